"""One change at a time: ours by flock, dpkg's and dkms's by waiting until they are done."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuguard.errors import LockHeldError, PrivilegeError, StateError
from gpuguard.host import Host
from gpuguard.host.files import make_dirs
from gpuguard.state import LOCK_FILE

_DPKG_LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock")
_POLL_SECONDS = 0.2


@contextmanager
def exclusive(host: Host, timeout: float) -> Iterator[None]:
    """Hold gpuguard's own lock of this root.

    Raises:
        LockHeldError: another gpuguard held it for ``timeout`` seconds.
        PrivilegeError: the lock file is not ours to make.
        StateError: the lock file cannot be made.
    """
    path = host.path(LOCK_FILE)
    try:
        make_dirs(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
    try:
        _wait_until(lambda: _flock(descriptor), timeout, "another gpuguard is at work")
        yield
    finally:
        os.close(descriptor)  # releases the lock, also after a crash


def is_held(host: Host) -> bool:
    """True if a gpuguard is at work on this root; only looks, needs no rights."""
    try:
        descriptor = os.open(host.path(LOCK_FILE), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def wait_for_package_tools(host: Host, timeout: float) -> None:
    """Wait until no apt, dpkg or dkms works on this root.

    Their locks are only looked at, never taken: a held dpkg lock would make the
    operator's apt fail.

    Raises:
        LockHeldError: they were still at work after ``timeout`` seconds.
    """

    def is_free() -> bool:
        return not any(_is_posix_locked(host.path(lock)) for lock in _DPKG_LOCKS)

    _wait_until(is_free, timeout, "apt or dpkg is at work")
    _wait_until(lambda: not dkms_runs(host), timeout, "dkms is at work")


def dkms_runs(host: Host) -> bool:
    """True if a dkms process works on this root (dkms 3.0 has no lock of its own)."""
    import psutil

    for process in psutil.process_iter(["cmdline", "pid"]):
        words = process.info["cmdline"] or []
        if any(Path(word).name == "dkms" for word in words[:3]):
            if not host.is_live:
                # a dkms that works on a tree names it: --installtree ROOT/lib/modules
                if any(f"{host.root}/" in f"{word}/" for word in words):
                    return True
                continue
            with suppress(OSError):
                if os.stat(f"/proc/{process.info['pid']}/root") == os.stat("/"):  # noqa: PTH116
                    return not any("tree" in word for word in words)
    return False


def _wait_until(is_done: Callable[[], bool], timeout: float, who: str) -> None:
    deadline = time.monotonic() + timeout
    while not is_done():
        if time.monotonic() >= deadline:
            raise LockHeldError(
                f"{who}, still after {timeout:g} s",
                hint="wait until it is done and try again; nothing was changed",
            )
        time.sleep(_POLL_SECONDS)


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _is_posix_locked(path: Path) -> bool:
    # dpkg locks with fcntl(F_SETLK); F_GETLK only asks
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # no dpkg here, or not ours to read: apt could not be in our way
    try:
        ask = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, ask)
        return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(descriptor)
