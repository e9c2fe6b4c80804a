"""Walk a module tree as depmod does."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
    return _walk(host, top, str(top), set())


def _walk(
    host: Host, folder: Path, shown: str, followed: set[Path]
) -> Iterator[tuple[str, list[str]]]:
    for real, dirs, files in os.walk(folder, onerror=_could_not_look):
        named = shown + real.removeprefix(str(folder))
        yield named, files
        if not followed:  # the top of the tree: these lead to the headers
            followed.add(folder)
            dirs[:] = [name for name in dirs if name not in ("build", "source")]
        for link in (f"{real}/{name}" for name in dirs if Path(real, name).is_symlink()):
            target = _folder_of(host, Path(link))
            if target is not None and target not in followed:
                followed.add(target)
                yield from _walk(host, target, f"{named}/{Path(link).name}", followed)


def _folder_of(host: Host, link: Path) -> Path | None:
    for target in (host.path(host.inside(link)), link.resolve()):
        if target.is_dir() and target.is_relative_to(host.root):
            return target
    return None


def _could_not_look(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise ProbeError(f"{error.filename} cannot be read: {error.strerror}") from error
