"""Resolve paths inside a root without ever leaving it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_MAX_SYMLINKS = 40  # as the kernel's own limit, path_resolution(7)


def resolve_in_root(root: Path, absolute: str, *, follow_last: bool = True) -> Path:
    """Resolve a path as if ``root`` were ``/``; an absolute symlink stays inside.

    Args:
        root: directory that stands for ``/``.
        absolute: path inside it; need not exist.
        follow_last: False leaves a symlink at the last component alone.

    Raises:
        OSError: ELOOP, on more than 40 symlinks.
    """
    todo, current, followed = absolute.split("/")[::-1], root, 0
    while todo:
        name = todo.pop()
        if name in ("", "."):
            continue
        if name == "..":
            current = current.parent if current != root else root
            continue
        step = current / name
        is_last = not any(part not in ("", ".") for part in todo)
        if (follow_last or not is_last) and step.is_symlink():
            followed += 1
            if followed > _MAX_SYMLINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), absolute)
            target = os.fspath(step.readlink())
            current = root if target.startswith("/") else current
            todo += target.split("/")[::-1]
        else:
            current = step
    return current
