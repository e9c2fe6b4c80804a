"""Compile where nothing can stay behind, and where nothing that stayed behind can get in.

Two walls, for root alone. A *group number* that nobody has, another one for each build: staging
is open to this group only, so that no other process of the build's account can enter (one left
by an earlier build, or a foreign one of ``nobody``); and since it cannot be put off it marks
every process of the build. A *PID namespace*, where the machine gives us one: when make ends,
the kernel has killed everybody in it before we hear of it.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpuguard.errors import BuildError, CommandError
from gpuguard.host import BuildUser, Host
from gpuguard.host.accounts import as_user

#: Unused by every scheme that systemd's UIDS-GIDS.md knows; the next number is out of range there.
_FIRST, _LAST = 0x70000000, 0x7FFFFFFE
_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_GRACE = 5.0
_POLL_SECONDS = 0.01
_GIDS = re.compile(r"^Gid:\s+(.*)$", re.MULTILINE)
_ZOMBIE = re.compile(r"^State:\s+[ZX]", re.MULTILINE)


def enclose(folder: Path, user: BuildUser | None) -> BuildUser | None:
    """Open a new folder of root's to a fresh group alone; returns the account with this group.

    Where that is not possible (a container without so many numbers) the folder is open to all
    and the account as it was.
    """
    if user is not None:
        gid = _FIRST + secrets.randbelow(_LAST - _FIRST + 1)
        with suppress(OSError):
            os.chown(folder, -1, gid)
            folder.chmod(0o750)
            return replace(user, gid=gid)
    folder.chmod(0o755)
    return user


def words_before(host: Host, user: BuildUser | None) -> tuple[str, ...]:
    """What to put before a command so that it runs as the account, in a PID namespace of its own.

    Empty if this machine has no such namespace to give, or there is no other account.
    """
    if user is None:
        return ()
    # In a chroot, /proc cannot be mounted anew; a namespace without it is as tight
    for namespace in (_NAMESPACE, _NAMESPACE[:-1]):
        with suppress(CommandError):
            host.run(*namespace, "true", timeout=10)
            inner = as_user(user, dies_with_parent=True)
            return ("setpriv", "--pdeathsig=KILL", "--", *namespace, *inner)
    return ()


def clear(user: BuildUser | None) -> None:
    """Make sure that no process of this build is left; what there is, is killed.

    Raises:
        BuildError: ``build-left-processes``: one cannot be killed.
    """
    if user is None or not _FIRST <= user.gid <= _LAST:
        return
    deadline = time.monotonic() + _GRACE
    while left := list(_members(user.gid)):
        if time.monotonic() > deadline:
            raise BuildError(
                f"processes of the build cannot be killed: {', '.join(map(str, left))}",
                hint="they hang in the kernel, see dmesg; try again after a reboot",
                code="build-left-processes",
            )
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _members(gid: int) -> Iterator[int]:
    """Living processes that have a group as one of their own four."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):
            # Not the owner of /proc/PID: a process can make that root's (PR_SET_DUMPABLE)
            text = (entry / "status").read_text("utf-8", "replace")
            match = _GIDS.search(text)
            if match and str(gid) in match[1].split() and not _ZOMBIE.search(text):
                yield int(entry.name)
