"""Which entries of a source folder a build made, and a digest over the rest.

An operator's folder may have been compiled in place. What the build left behind is neither
source nor wanted: a stale object would be linked into the new module.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DIRECTORIES = frozenset({"_out", ".git", ".tmp_versions"})
_PATHS = frozenset({"kernel-open/conftest"})  # headers that conftest.sh made for one kernel
#: kbuild's and NVIDIA's outputs. nv-kernel.o_binary is NVIDIA's link to what src/ was compiled to.
_FILES = re.compile(
    r"(?:.*\.(?:o|ko|a|mod|mod\.c|o_binary|lto)|\..*\.(?:cmd|d|o\.d)|Module\.symvers|modules\.order)$"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or symlink of a source tree; ``name`` is relative, with ``/``."""

    name: str
    status: os.stat_result

    @property
    def is_link(self) -> bool:
        """True for a symlink, which is kept as one and never followed."""
        return stat.S_ISLNK(self.status.st_mode)


def entries(tree: Path, *, skip: frozenset[str] = frozenset()) -> Iterator[Entry]:
    """Every file and symlink of a tree that is source, sorted by name within each folder.

    Args:
        tree: folder to walk; symlinks in it are not followed.
        skip: relative paths of folders to leave out besides build products.
    """
    pending = [""]
    while pending:
        prefix = pending.pop()
        folders = []
        with os.scandir(tree / prefix) as scan:
            for item in sorted(scan, key=lambda found: found.name):
                name = f"{prefix}{item.name}"
                if item.is_dir(follow_symlinks=False):
                    if item.name not in _DIRECTORIES and name not in _PATHS | skip:
                        folders.append(f"{name}/")
                elif not _FILES.match(item.name) and item.name != ".git":
                    yield Entry(name, item.stat(follow_symlinks=False))
        pending += reversed(folders)


def digest(tree: Path, found: Iterator[Entry] | list[Entry]) -> str:
    """SHA-256 over name, kind, executable bit and content of every entry, in order.

    Owner and times do not count: an export of the same content has the same digest.
    """
    total = hashlib.sha256()
    for entry in found:
        total.update(f"{entry.name}\0{_kind(entry.status)}\0".encode("utf-8", "surrogateescape"))
        if entry.is_link:
            total.update(os.fsencode((tree / entry.name).readlink()))
        elif stat.S_ISREG(entry.status.st_mode):
            total.update(_file_digest(tree / entry.name))
        total.update(b"\0")
    return total.hexdigest()


def _kind(status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return "l"
    return "x" if status.st_mode & stat.S_IXUSR else "f"


def _file_digest(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
