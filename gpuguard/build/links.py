"""Symlinks of a source must stay in it.

What lies outside is neither in the source's digest nor looked at for who can write it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from gpuguard.build.trust import everything_below
from gpuguard.errors import BuildError

CODE = "source-link-outside"
HINT = "put the file itself in its place: what is outside of the source is not looked after"


def leaves(name: str, target: str) -> bool:
    """True if a link, by its name and target alone, leads out of the tree or is absolute."""
    if target.startswith("/"):
        return True  # even into the tree: the export has another place
    return os.path.normpath(os.path.join(os.path.dirname(name), target)).startswith("..")  # noqa: PTH118, PTH120


def first_outside(tree: Path, names: Iterable[str]) -> str | None:
    """The first of a tree's symlinks that leads out of it: "name -> target"."""
    real = Path(os.path.realpath(tree))
    for name in names:
        target = os.fspath((tree / name).readlink())
        inside = Path(os.path.realpath(tree / name)).is_relative_to(real)
        if leaves(name, target) or not inside:
            return f"{name} -> {target}"
    return None


def must_stay_inside(tree: Path) -> None:
    """Refuse an exported tree with a symlink that leads out of it.

    Raises:
        BuildError: ``source-link-outside``.
    """
    found = (
        str(path.relative_to(tree))
        for path, status in everything_below(tree)
        if stat.S_ISLNK(status.st_mode)
    )
    if outside := first_outside(tree, found):
        raise BuildError(f"the source, or a patch, has a link out of it: {outside}",
                         hint=HINT, code=CODE)  # fmt: skip
