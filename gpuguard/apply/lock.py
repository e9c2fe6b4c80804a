"""One change at a time: ours by flock, dpkg's and dkms's by waiting until they are done."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shlex
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
_LONGEST_POLL_SECONDS = 3.0
_OURS_ALONE = 0o600
_SHELLS = frozenset({"bash", "dash", "sh"})
_ONLY_LOOKS = frozenset({"status", "--version", "-V", "--help", "-h"})


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
    try:
        with suppress(OSError):  # whoever may open it may lock it, and keep us waiting
            os.fchmod(descriptor, _OURS_ALONE)
        _wait_until(lambda: _flock(descriptor), timeout, "another gpuguard is at work")
        yield
    finally:
        os.close(descriptor)  # releases the lock, also after a crash


def is_held(host: Host) -> bool:
    """True if a gpuguard is at work on this root; only looks, needs no rights."""
    try:
        descriptor = os.open(host.path(LOCK_FILE), os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return _is_listed(host.path(LOCK_FILE))
    except OSError:
        return False
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
    _wait_until(lambda: not dkms_runs(host), timeout, lambda: f"{dkms_runs(host)} is at work")


def dkms_runs(host: Host) -> str:
    """The dkms that works on this root, with its pid; "" if none does.

    dkms 3.0 has no lock of its own. Only one that could change the root counts: anybody may
    call a process dkms, and people look at its files.
    """
    import psutil

    able = {0} if host.is_live else {0, os.geteuid()}
    for process in psutil.process_iter(["cmdline", "pid", "uids"]):
        words, uids = process.info["cmdline"] or [], process.info["uids"]
        if uids is None or uids.effective not in able:
            continue
        if _is_dkms(words) and _is_for(host, process.info["pid"], words):
            return f"dkms ({shlex.join(words)[:200]}, process {process.info['pid']})"
    return ""


def _is_dkms(words: list[str]) -> bool:
    """Dkms is a script: ``/bin/bash /usr/sbin/dkms install …``, or a hook of that name."""
    names = [Path(word).name for word in words]
    if names and names[0] in _SHELLS:
        names = [name for name, word in zip(names[1:], words[1:], strict=True) if word[:1] != "-"]
    return names[:1] == ["dkms"] and not _ONLY_LOOKS.intersection(words)


def _is_for(host: Host, pid: int, words: list[str]) -> bool:
    if not host.is_live:
        # a dkms that works on a tree names it: --installtree ROOT/lib/modules
        return any(f"{host.root}/" in f"{word}/" for word in words)
    with suppress(OSError):
        if os.stat(f"/proc/{pid}/root") == os.stat("/"):  # noqa: PTH116
            return not any("tree" in word for word in words)
    return False


def _wait_until(is_done: Callable[[], bool], timeout: float, who: str | Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout
    pause = _POLL_SECONDS
    while not is_done():
        if time.monotonic() >= deadline:
            culprit = who if isinstance(who, str) else who()
            raise LockHeldError(
                f"{culprit}, still after {timeout:g} s",
                hint="wait until it is done and try again; nothing was changed",
            )
        # apt may work for minutes; and those who wait together should not look together
        time.sleep(min(random.uniform(0.5, 1.0) * pause, max(0.0, deadline - time.monotonic())))  # noqa: S311
        pause = min(pause * 1.3, _LONGEST_POLL_SECONDS)


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
