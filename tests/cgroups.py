"""What a container leaves in the control groups that were made for it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def remove_cgroups(name: str) -> None:
    for hierarchy in ("", "unified", "systemd"):
        top = Path("/sys/fs/cgroup", hierarchy, name)
        for folder, _, _ in os.walk(top, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()
