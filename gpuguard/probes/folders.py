"""Walk a module tree as depmod does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpuguard.errors import ProbeError
from gpuguard.host import Host


def folders_of(host: Host, top: Path) -> Iterator[tuple[str, list[str]]]:
    """Every folder by its name in the tree, and the names of the files in it.

    Links to folders are followed, as depmod follows them; each target once, so that a loop
    ends, and never out of the root.

    Raises:
        ProbeError: a folder cannot be read.
    """
    followed, todo = {top}, [(str(top), str(top))]
    while todo:
        real, named = todo.pop()
        files = []
        for entry in _entries(real):
            if not _is_dir(entry):
                files.append(entry.name)
            elif named == str(top) and entry.name in ("build", "source"):
                continue  # these lead to the headers
            elif not entry.is_symlink():
                todo.append((entry.path, f"{named}/{entry.name}"))
            elif (target := _folder_of(host, Path(entry.path))) and target not in followed:
                followed.add(target)
                todo.append((str(target), f"{named}/{entry.name}"))
        yield named, files


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ProbeError(f"{folder} cannot be read: {error.strerror}") from error


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _folder_of(host: Host, link: Path) -> Path | None:
    with suppress(OSError, RuntimeError):  # too many links: depmod sees nothing there either
        for target in (host.path(host.inside(link)), link.resolve()):
            if target.is_dir() and target.is_relative_to(host.root):
                return target
    return None
