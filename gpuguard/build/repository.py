"""Where a clone's content really lies, and whether root may believe all of it.

A folder of root's can lead git elsewhere: ``.git`` may be a file (``git worktree``), the
repository may share the better part of another (``commondir``), and objects may come from a
third one (``git clone --shared``). git does not check objects against their names when it reads
them, and it obeys whatever the configuration says: so each of these places counts.

Paths that git wrote are taken as git takes them, as paths of this process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuguard.build.trust import Trust, account_of, everything_below, owner_of
from gpuguard.errors import ProbeError
from gpuguard.host import BuildUser
from gpuguard.host.files import way_to

_MAX_DEPTH = 5  # git's own limit for alternates of alternates
_MAX_BYTES = 1 << 16
_INCLUDE = re.compile(r"^\s*\[\s*include(?:if)?\b", re.IGNORECASE | re.MULTILINE)
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository; ``git_dir`` is what git is told, ``common`` has refs, objects, configuration.

    ``pointers`` are the files and folders that led here, as they were written.
    """

    git_dir: Path
    common: Path
    alternates: tuple[Path, ...]
    pointers: tuple[Path, ...]

    @property
    def places(self) -> tuple[Path, ...]:
        """Every folder that git reads from."""
        return tuple(dict.fromkeys((self.common, self.git_dir, *self.alternates)))

    def problem(self, trust: Trust) -> str | None:
        """Why root should not believe it, or None."""
        if not trust.enforced:
            return None
        for pointer in self.pointers:
            if reason := trust.problem_at(pointer):
                return reason
        for place in self.places:
            if reason := trust.problem_within(place):
                return reason
        for name in (self.common / "config", self.git_dir / "config.worktree"):
            if name.is_file() and _INCLUDE.search(_read(name)):
                return f"{name} includes other files, which are not checked"
        return None

    def owner(self) -> BuildUser | None:
        """The account that must read it: the first that is not root; None: this process's.

        A single file that is not root's is enough: it may be the configuration, and what that
        names must not be run by root.
        """
        if os.geteuid() != 0:
            return None
        for place in self.places:
            if owner := owner_of(place):
                return owner
        for place in self.places:
            for _, status in everything_below(place):
                if status.st_uid != 0:
                    return account_of(status)
        return None


def find(folder: Path) -> Repository | None:
    """The repository of a clone, a worktree or a bare clone; None: it is none.

    Raises:
        ProbeError: it leads to somewhere else in a way that cannot be followed.
    """
    pointers = []
    git_dir = folder
    if os.path.lexists(folder / ".git"):
        pointers.append(folder / ".git")
        if (folder / ".git").is_file():
            pointers.append(folder / _pointed_to(folder / ".git"))
        git_dir = pointers[-1]
    elif not all((folder / name).exists() for name in ("HEAD", "objects", "refs")):
        return None
    common = git_dir
    if (git_dir / "commondir").is_file():
        common = git_dir / _read(git_dir / "commondir").rstrip("\n")
        pointers.append(common)
    alternates = tuple(_alternates(_real(common) / "objects", _MAX_DEPTH))
    return Repository(
        git_dir=_real(git_dir),
        common=_real(common),
        alternates=tuple(map(_real, alternates)),
        pointers=(*pointers, *alternates),
    )


def _alternates(objects: Path, depth: int) -> Iterator[Path]:
    file = objects / "info" / "alternates"
    if not file.is_file():
        return
    if depth == 0:
        raise ProbeError(f"{file}: repositories that borrow from one another, without end")
    for line in _read(file).splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith('"'):
            raise ProbeError(
                f"{file} has a name in quotation marks", hint="write it as a plain absolute path"
            )
        yield objects / line
        yield from _alternates(_real(objects / line), depth - 1)


def _pointed_to(file: Path) -> str:
    text = _read(file)
    if not text.startswith("gitdir: "):
        raise ProbeError(f"{file} is not a repository, and names none")
    return text.removeprefix("gitdir: ").rstrip("\n")


def _real(path: Path) -> Path:
    return way_to(path, _ROOT)[0]


def _read(file: Path) -> str:
    with file.open("rb") as content:
        return os.fsdecode(content.read(_MAX_BYTES))
