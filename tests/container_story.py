"""What stories of lanes in containers share: a machine with images and the front, and its lanes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import booted_roots
from tests.booted import Machine
from tests.booted_containers import container_machine
from tests.test_lane_booted import write_lane

QUICK = "[Service]\nRestartSec=1\n"


def story_machine(folder: Path) -> Iterator[Machine]:
    """For one module's story: the front is up, no lane is declared; never skipped in CI."""
    if reason := booted_roots.missing():
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    with container_machine(folder) as system:
        assert system.gpuguard("lane", "setup").returncode == 0
        system.systemctl("daemon-reload")
        system.systemctl("start", "gpuguard-front.service")
        yield system


def declare(system: Machine, name: str, backend: str, image: str, **changes: Any) -> None:
    """A lane in a container, without cards."""
    engine = {"backend": backend, "image": image, "gpus": "none", "venv": None}
    given = {**engine, **changes.pop("engine", {})}
    write_lane(system, name, engine=given, **changes)


def drop_in(system: Machine, place: str, text: str) -> None:
    """Put something on top of what gpuguard wrote; an empty text takes it away again."""
    file = system.live_path(place)
    file.parent.mkdir(parents=True, exist_ok=True)
    if text:
        file.write_text(text)
    else:
        file.unlink()
    system.systemctl("daemon-reload")


_OURS = """import sys
from gpuguard.host import LocalHost
from gpuguard.serving.strangers import own_pids
pids = {int(pid) for pid in sys.argv[2:]}
own, _ = own_pids(LocalHost(), pids, frozenset(sys.argv[1].split(",")))
print(*sorted(own))
"""


def ours(system: Machine, names: str, pids: set[int]) -> str:
    """What gpuguard takes for processes of the lanes with these names."""
    python = "/opt/gpuguard/bin/python"
    return system.run(python, "-c", _OURS, names, *map(str, pids)).stdout.strip()


def processes(system: Machine, server: str) -> set[int]:
    """A server and its engine."""
    children = system.run("pgrep", "-P", server).stdout.split()
    return {int(pid) for pid in (server, *children)}
