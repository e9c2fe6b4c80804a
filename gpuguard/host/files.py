"""File operations that survive power loss, and checks of files that root is to trust."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_CHUNK = 1 << 20  # modules weigh up to hundreds of MB: never read whole
_MAX_SYMLINKS = 40  # as the kernel's own limit, path_resolution(7)


def fsync_dir(directory: Path) -> None:
    """Make renames and unlinks in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(file: Path) -> None:
    """Make a file's content and its directory entry durable; absent is fine."""
    with suppress(FileNotFoundError):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fsync_dir(file.parent)


def make_dirs(directory: Path, *, mode: int = 0o755) -> None:
    """Make a directory and its parents, durably, whatever the umask; others keep their mode."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for step in reversed(missing):
        with suppress(FileExistsError):
            step.mkdir(mode=mode)
            step.chmod(mode)
        fsync_dir(step.parent)


def replace_atomically(target: Path, source: Path | bytes, *, mode: int) -> None:
    """Write beside the target, fsync, rename over it, fsync the directory.

    The temporary name ends in ``.gpuguard-new``: depmod scans for ``.ko*`` only, so a
    half-written module can never be picked up.
    """
    descriptor, name = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=".gpuguard-new"
    )
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as sink:
            if isinstance(source, bytes):
                sink.write(source)
            else:
                with source.open("rb") as origin:
                    shutil.copyfileobj(origin, sink, _CHUNK)
            os.fchmod(sink.fileno(), mode)
            sink.flush()
            os.fsync(sink.fileno())
        temporary.rename(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(target.parent)


def sha256_file(path: Path) -> str:
    """Hex digest of a file's content, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def writable_by_others(
    path: Path,
    trusted_uids: frozenset[int] = frozenset({0}),
    trusted_gids: frozenset[int] = frozenset({0}),
    *,
    root: Path = Path("/"),
    missing_ok: bool = False,
) -> str | None:
    """Why root should not trust a file, or None if only trusted accounts can change it.

    Looks at the file and at everything on the way to it, each symlink and its own parents
    included: whoever can write a folder on the way can swap what it leads to. A sticky
    directory (``/tmp``) protects entries of trusted owners.

    Args:
        path: the file, its symlinks not resolved yet.
        trusted_uids: accounts that may own it.
        trusted_gids: groups that may write it.
        root: directory above it that absolute symlinks stay in (``--root``).
        missing_ok: it need not be there: then, whether only the trusted can put it there.

    Raises:
        OSError: it is not there, or its symlinks are a loop.
    """
    real, steps = way_to(path, root)
    if missing_ok:
        steps = [step for step in steps if os.path.lexists(step)]
        while not os.path.lexists(real):
            real = real.parent
    for step in reversed(steps):
        status = step.lstat()
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and step != real
        reason = distrusted(step, status, trusted_uids, trusted_gids, sticky=bool(sticky))
        if reason is not None:
            return reason
    return None


def distrusted(
    path: Path,
    status: os.stat_result,
    trusted_uids: frozenset[int],
    trusted_gids: frozenset[int],
    *,
    sticky: bool = False,
) -> str | None:
    """Why one file or directory by itself can be changed by others than the trusted."""
    mode = f"(mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_uid not in trusted_uids:
        return f"{path} is owned by uid {status.st_uid}"
    if sticky or stat.S_ISLNK(status.st_mode):  # a symlink's own mode means nothing
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"{path} is writable by everyone {mode}"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in trusted_gids:
        return f"{path} is writable by group {status.st_gid} {mode}"
    return None


def way_to(path: Path, root: Path) -> tuple[Path, list[Path]]:
    """Where a path leads, and what one passes on the way: folders, symlinks, itself.

    Raises:
        OSError: ELOOP, on more than 40 symlinks.
    """
    steps = dict.fromkeys([*reversed(root.parents), root])
    todo, current, followed = list(path.absolute().relative_to(root).parts)[::-1], root, 0
    while todo:
        name = todo.pop()
        if name in ("", "."):
            continue
        if name == "..":
            current = current if current == root else current.parent
            continue
        steps[step := current / name] = None
        if not step.is_symlink():
            current = step
            continue
        followed += 1
        if followed > _MAX_SYMLINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = os.fspath(step.readlink())
        current = root if target.startswith("/") else current
        todo += target.split("/")[::-1]
    return current, list(steps)
