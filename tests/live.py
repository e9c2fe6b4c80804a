"""What the machine that runs the tests looks like, where gpuguard and DKMS would change it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

WATCHED = (
    "/etc/gpuguard",
    "/var/lib/gpuguard",
    "/etc/depmod.d",
    "/lib/modules",
    "/var/lib/dkms",
)

#: Path to (mode, size, time of change in nanoseconds), of files, links and folders.
Snapshot = dict[str, tuple[int, int, int]]

BEFORE = pytest.StashKey[Snapshot]()


def snapshot(folders: tuple[str, ...] = WATCHED) -> Snapshot:
    """Every entry below some folders, without reading contents."""
    return dict(entry for folder in folders for entry in _entries(Path(folder)))


def _entries(top: Path) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for folder, _, names in os.walk(top):
        for path in (folder, *(f"{folder}/{name}" for name in names)):
            with suppress(FileNotFoundError):  # somebody else's temporary file
                status = os.lstat(path)
                yield path, (status.st_mode, status.st_size, status.st_mtime_ns)


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """What was made, removed or changed, one line each."""
    return sorted(
        [f"made: {path}" for path in after.keys() - before.keys()]
        + [f"removed: {path}" for path in before.keys() - after.keys()]
        + [
            f"changed: {path}"
            for path in before.keys() & after.keys()
            if before[path] != after[path]
        ]
    )
