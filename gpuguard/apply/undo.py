"""Undo as data: how one path looked before, and how to make it look so again.

Each record is idempotent and needs no program, only files: it can be carried out by the
next start after a ``kill -9`` or a power loss.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuguard.apply.objects import ObjectStore
from gpuguard.errors import StateError
from gpuguard.host import Host
from gpuguard.host.files import fsync_dir, make_dirs, sha256_file

#: Left behind by our own atomic writes, and by depmod (kmod 30: NAME.PID.SEC.USEC).
_TEMPORARY = re.compile(r"^\..+\.gpuguard-new$|^modules\.[a-z.]+\.\d+\.\d+\.\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBefore:
    """A regular file as it was; ``digest`` names its content in the object store."""

    path: str
    digest: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBefore:
    """A symlink as it was."""

    path: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingBefore:
    """Nothing was at this path."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFolderBefore:
    """This folder did not exist; it goes again if it is empty."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Temporary files of an interrupted write in this folder go, on every way out."""

    path: str


Undo = FileBefore | LinkBefore | NothingBefore | NoFolderBefore | Sweep
_KINDS: dict[str, type[Undo]] = {
    "file": FileBefore,
    "link": LinkBefore,
    "nothing": NothingBefore,
    "no-folder": NoFolderBefore,
    "sweep": Sweep,
}


def look(path: str, host: Host, store: ObjectStore) -> Undo:
    """Record how a path looks now, keeping its content in the store."""
    real = host.path(path, follow=False)
    try:
        status = real.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return NothingBefore(path=path)
    if stat.S_ISLNK(status.st_mode):
        return LinkBefore(path=path, target=str(real.readlink()))
    if not stat.S_ISREG(status.st_mode):
        raise StateError(
            f"{path} is neither a file nor a link: not touched",
            code="odd-file",
            hint=f"see what it is, and move it away: ls -ld {path}",
        )
    return FileBefore(
        path=path,
        digest=store.add(real),
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
    )


def put_back(undo: Undo, host: Host, store: ObjectStore) -> None:
    """Make a path look as recorded. Doing it twice is the same as once.

    Raises:
        RollbackError: the kept content is gone or damaged.
        OSError: the path cannot be written.
    """
    match undo:
        case FileBefore():
            _put_back_file(undo, host, store)
        case LinkBefore():
            _put_back_link(undo, host)
        case NothingBefore():
            host.remove_file(undo.path)
        case NoFolderBefore():
            host.remove_empty_dir(undo.path)
        case Sweep():
            sweep(undo, host)


def is_back(undo: Undo, host: Host) -> bool:
    """True if a path looks as recorded."""
    real = host.path(undo.path, follow=False)
    match undo:
        case FileBefore():
            with suppress(OSError):
                return not real.is_symlink() and sha256_file(real) == undo.digest
            return False
        case LinkBefore():
            return real.is_symlink() and str(real.readlink()) == undo.target
        case NothingBefore():
            return not real.exists() and not real.is_symlink()
        case _:
            return True


def sweep(undo: Sweep, host: Host) -> None:
    """Remove temporary files of interrupted writes."""
    folder = host.path(undo.path)
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if _TEMPORARY.match(entry.name):
            entry.unlink(missing_ok=True)


def to_json(undo: Undo) -> dict[str, Any]:
    """A journal line's content."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(undo, cls))
    return {"op": kind, **asdict(undo)}


def from_json(document: dict[str, Any]) -> Undo:
    """The reverse; unknown extra keys are ignored.

    Raises:
        ValueError: not a journal line of ours.
    """
    try:
        cls = _KINDS[document["op"]]
        fields = {name: document[name] for name in cls.__dataclass_fields__}
        return cls(**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a line lacks {error}") from error


def _put_back_file(undo: FileBefore, host: Host, store: ObjectStore) -> None:
    real = host.path(undo.path, follow=False)
    if not is_back(undo, host):
        host.replace_file(undo.path, store.verified(undo.digest), mode=undo.mode)
    _set_owner_and_time(real, undo)


def _set_owner_and_time(real: Path, undo: FileBefore) -> None:
    status = real.stat()
    if (status.st_uid, status.st_gid) != (undo.uid, undo.gid):
        with suppress(PermissionError):  # not root: a tree of our own
            os.chown(real, undo.uid, undo.gid)
    real.chmod(undo.mode)
    os.utime(real, ns=(undo.mtime_ns, undo.mtime_ns))


def _put_back_link(undo: LinkBefore, host: Host) -> None:
    if is_back(undo, host):
        return
    host.remove_file(undo.path)
    real = host.path(undo.path, follow=False)
    make_dirs(real.parent)
    real.symlink_to(undo.target)
    fsync_dir(real.parent)
