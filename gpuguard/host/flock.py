"""Lock files by flock(2): let go by the kernel, however their holder ends."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from gpuguard.errors import PrivilegeError, StateError
from gpuguard.host.files import make_dirs
from gpuguard.host.port import Host

_OURS_ALONE = 0o600


def open_lock(host: Host, file: str) -> int:
    """A descriptor of a lock file, which is made where there is none; closing it lets go.

    Raises:
        PrivilegeError: the lock file is not ours to make.
        StateError: it cannot be made.
    """
    path = host.path(file)
    try:
        make_dirs(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _OURS_ALONE)
    except PermissionError as error:
        raise PrivilegeError(
            f"cannot open {path}: {error.strerror}", hint="run gpuguard with sudo"
        ) from error
    except OSError as error:
        raise StateError(
            f"cannot open {path}: {error.strerror}",
            code="state-unwritable",
            hint="see that the disk is writable and not full",
        ) from error
    with suppress(OSError):  # whoever may open it may lock it, and keep us waiting
        os.fchmod(descriptor, _OURS_ALONE)
    return descriptor


def try_lock(descriptor: int) -> bool:
    """Take the lock if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def wait_for_lock(descriptor: int) -> None:
    """Take the lock, however long others have it; a signal ends the wait."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def is_locked(host: Host, file: str) -> bool | None:
    """Whether somebody holds the lock; only looks. None: it cannot be told."""
    path = host.path(file)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True if _is_listed(path) else None
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_listed(path: Path) -> bool:
    # For those who may not open it, the kernel's list: "1: FLOCK ADVISORY WRITE PID fe:00:INODE …"
    with suppress(OSError):
        wanted = path.stat()
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] != "FLOCK" or words[5].rpartition(":")[2] != str(wanted.st_ino):
                continue
            # device numbers differ there on some file systems: who holds it tells instead
            with suppress(OSError):
                if Path("/proc", words[4]).stat().st_uid == wanted.st_uid:
                    return True
    return False
