"""How NCCL connects the cards of a lane: asked for before each start, read once it runs.

NCCL buffers what it writes to standard output, so the last 4 KiB may never reach the journal; a
file that it opens itself is written line by line. Each process of the engine has one, in the lane's
cache, which the engine's account can write.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpuguard.host import Host
from gpuguard.serving.lane import Lane
from gpuguard.serving.p2p_policy import LOG_VARIABLES, crosses_cards
from gpuguard.serving.render import cache_dir

_PATTERN = "nccl.*.log"
_NAME = "nccl.%h.%p.log"
_INNER_CACHE = "/cache"  # as render mounts it
_MOST_BYTES = 4 << 20
_MOST_FILES = 32


def variables(lane: Lane) -> dict[str, str]:
    """What makes NCCL tell; nothing where the lane's own environment decides about its log."""
    if not crosses_cards(lane) or any(name in lane.env for name in LOG_VARIABLES):
        return {}
    folder = cache_dir(lane.lane_id) if lane.engine.backend == "venv" else _INNER_CACHE
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV",
        "NCCL_DEBUG_FILE": f"{folder}/{_NAME}",
    }


def forget(host: Host, lane: Lane) -> None:
    """Before a start: what an earlier one wrote is not about this one."""
    for path in _files(host, lane):
        with suppress(OSError):
            path.unlink()


def lines(host: Host, lane: Lane) -> tuple[str, ...]:
    """What the processes of this start wrote."""
    found: list[str] = []
    for path in _files(host, lane)[:_MOST_FILES]:
        found += _read(path)
    return tuple(found)


def _files(host: Host, lane: Lane) -> list[Path]:
    return sorted(host.path(cache_dir(lane.lane_id)).glob(_PATTERN))


def _read(path: Path) -> Iterator[str]:
    # The folder is the engine's: what lies there may be a link, a pipe, or without end.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return
    with os.fdopen(descriptor, "rb") as file:
        yield from file.read(_MOST_BYTES).decode("utf-8", "replace").splitlines()
