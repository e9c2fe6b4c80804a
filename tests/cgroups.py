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


@contextmanager
def prepared(debian: Debian, folder: Path) -> Iterator[Machine]:
    """A machine that runs its older kernel; gpuguard is there as pip installs it, and idle."""
    base = get_base(debian)
    with overlay(base.layers, folder) as root:
        install_gpuguard(root, build_wheel(folder))
        with machine(root, base, folder) as system:
            system.boot(base.old)
            yield system
