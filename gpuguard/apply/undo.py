"""Undo as data: how one path looked before, and how to make it look so again.

Each record is idempotent and needs no program, only files: it can be carried out by the
next start after a ``kill -9`` or a power loss.
"""

from __future__ import annotations

import hashlib
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
class FolderBefore:
    """A folder that may go when it is emptied, and comes back with a file in it."""

    path: str
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Temporary files of an interrupted write in this folder go, on every way out."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """What the change makes of a path (see ``state_of``): anything else is somebody else's."""

    path: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBefore:
    """What depmod reads for a release, as a fingerprint: as before, its outputs are, too."""

    path: str
    release: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBefore:
    """An image whose undo may need its tool; ``content`` is where a link at ``path`` leads.

    ``packages`` is a fingerprint of what is installed: as before, nobody else made an image.
    """

    path: str
    release: str
    content: str
    packages: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuBefore:
    """A boot menu, which its tool makes of files that are put back before it."""

    path: str


FileUndo = FileBefore | LinkBefore | NothingBefore
Undo = (
    FileUndo | NoFolderBefore | FolderBefore | Sweep | Wrote | TreeBefore | ImageBefore | MenuBefore
)
_KINDS: dict[str, type[Undo]] = {
    "file": FileBefore,
    "link": LinkBefore,
    "nothing": NothingBefore,
    "no-folder": NoFolderBefore,
    "folder": FolderBefore,
    "sweep": Sweep,
    "wrote": Wrote,
    "tree": TreeBefore,
    "image": ImageBefore,
    "menu": MenuBefore,
}
_NOTHING = "nothing"


def look(path: str, host: Host, store: ObjectStore) -> FileUndo:
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


def state_of(path: str, host: Host) -> str:
    """What is at a path now, in one word that can be compared with others."""
    real = host.path(path, follow=False)
    try:
        kind = real.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _NOTHING
    if stat.S_ISLNK(kind):
        return f"link {real.readlink()}"
    return sha256_file(real) if stat.S_ISREG(kind) else "odd"


def state_before(undo: FileUndo) -> str:
    """The same of what was recorded."""
    match undo:
        case FileBefore():
            return undo.digest
        case LinkBefore():
            return f"link {undo.target}"
        case NothingBefore():
            return _NOTHING


def wrote(path: str, content: Path | bytes | None) -> Wrote:
    """For the journal, before a file is written or, with None, removed."""
    if content is None:
        return Wrote(path=path, state=_NOTHING)
    if isinstance(content, bytes):
        return Wrote(path=path, state=hashlib.sha256(content).hexdigest())
    return Wrote(path=path, state=sha256_file(content))


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
            put_link(undo, host)
        case NothingBefore():
            host.remove_file(undo.path)
        case NoFolderBefore():
            host.remove_empty_dir(undo.path)
        case FolderBefore():
            _set_folder(undo, host)
        case Sweep():
            sweep(undo, host)
        case Wrote() | TreeBefore() | ImageBefore() | MenuBefore():
            pass  # what recovery goes by


def is_back(undo: FileUndo, host: Host) -> bool:
    """True if a path looks as recorded."""
    try:
        return state_of(undo.path, host) == state_before(undo)
    except OSError:
        return False


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


def put_link(undo: LinkBefore, host: Host) -> None:
    """Make a link as it is described."""
    if is_back(undo, host):
        return
    real = host.path(undo.path, follow=False)
    make_dirs(real.parent)
    # in one step: killed in between, neither what was nor what we made would be there
    beside = real.with_name(f".{real.name}.gpuguard-new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(undo.target)
    beside.rename(real)
    fsync_dir(real.parent)


def _set_folder(undo: FolderBefore, host: Host) -> None:
    real = host.path(undo.path)
    if not real.is_dir():
        return
    status = real.stat()
    if (status.st_uid, status.st_gid) != (undo.uid, undo.gid):
        with suppress(PermissionError):  # not root: a tree of our own
            os.chown(real, undo.uid, undo.gid)
    if stat.S_IMODE(status.st_mode) != undo.mode:
        real.chmod(undo.mode)
