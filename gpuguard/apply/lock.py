"""One change at a time: ours by flock, dpkg's and dkms's by waiting until they are done."""

from __future__ import annotations

import fcntl
import os
import random
import shlex
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuguard.errors import LockHeldError
from gpuguard.host import Host
from gpuguard.host.flock import is_locked, open_lock, try_lock
from gpuguard.state import LOCK_FILE

_DPKG_LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock")
_POLL_SECONDS = 0.2
_LONGEST_POLL_SECONDS = 3.0
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
    descriptor = open_lock(host, LOCK_FILE)
    try:
        _wait_until(lambda: try_lock(descriptor), timeout, "another gpuguard is at work")
        yield
    finally:
        os.close(descriptor)  # releases the lock, also after a crash


def is_held(host: Host) -> bool:
    """True if a gpuguard is at work on this root; only looks, needs no rights."""
    return bool(is_locked(host, LOCK_FILE))


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
