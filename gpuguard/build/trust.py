"""Whom root believes: the owner and mode of source and patch files.

What others than root can write must never become a kernel module by way of root. An ordinary
user compiles with their own rights, so nothing is checked for them.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuguard.host import BuildUser, Host
from gpuguard.host.files import distrusted, way_to, writable_by_others


@dataclass(frozen=True, slots=True)
class Trust:
    """Accounts and groups whose files root compiles; ``enforced`` False: not root."""

    uids: frozenset[int]
    gids: frozenset[int]
    enforced: bool

    def problem(self, host: Host, absolute: str) -> str | None:
        """Why a path inside the host is not to be believed: the file, or anything on the way."""
        return self._of(host.root / absolute.lstrip("/"), host.root)

    def problem_at(self, path: Path) -> str | None:
        """As ``problem``, for a path of this process: git writes such into its own files."""
        return self._of(path, Path("/"))

    def problem_below(self, found: Iterable[tuple[Path, os.stat_result]]) -> str | None:
        """Why one of these files, by itself, is not to be believed."""
        if not self.enforced:
            return None
        reasons = (distrusted(path, status, self.uids, self.gids) for path, status in found)
        return next((reason for reason in reasons if reason is not None), None)

    def problem_within(self, folder: Path, root: Path = Path("/")) -> str | None:
        """Why something in a tree is not to be believed; its symlinks are followed, also out of it.

        Args:
            folder: resolved already.
            root: that absolute symlinks stay in.
        """
        if not self.enforced:
            return None
        pending, done = [folder], list[Path]()
        while pending:
            top = pending.pop()
            if any(top.is_relative_to(other) for other in done):
                continue
            done.append(top)
            for path, status in everything_below(top):
                reason = distrusted(path, status, self.uids, self.gids)
                if reason is None and stat.S_ISLNK(status.st_mode):
                    reason = self._of(path, root, missing_ok=True)
                    target = way_to(path, root)[0]
                    pending += [target] if target.is_dir() else []
                if reason is not None:
                    return reason
        return None

    def _of(self, path: Path, root: Path, *, missing_ok: bool = False) -> str | None:
        if not self.enforced:
            return None
        return writable_by_others(path, self.uids, self.gids, root=root, missing_ok=missing_ok)


def trust_in(owner: str | None) -> Trust:
    """Root, and the account that the operator named.

    Debian's and Ubuntu's ``useradd`` give each account a group of its own and Ubuntu a umask
    of 002: the account's files are writable by that group, which is nobody else.

    Raises:
        KeyError: no such account.
    """
    uids, gids = {0}, {0}
    if owner is not None and owner.isdecimal():
        uids.add(int(owner))  # a uid without an account, as files from an archive have it
    elif owner is not None:
        account = pwd.getpwnam(owner)
        uids.add(account.pw_uid)
        if _is_private(account.pw_gid, account.pw_name):
            gids.add(account.pw_gid)
    return Trust(frozenset(uids), frozenset(gids), enforced=os.geteuid() == 0)


def owner_of(path: Path) -> BuildUser | None:
    """The account that must read a folder that is not root's, when this process is root."""
    status = path.stat()
    return None if os.geteuid() != 0 or status.st_uid == 0 else account_of(status)


def account_of(status: os.stat_result) -> BuildUser:
    """The owner of a file. One without an account still has a number, and that is all it takes."""
    try:
        account = pwd.getpwuid(status.st_uid)
    except KeyError:
        return BuildUser(str(status.st_uid), status.st_uid, status.st_gid)
    return BuildUser(account.pw_name, account.pw_uid, account.pw_gid)


def everything_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each file and folder of a tree with its status, symlinks not followed."""
    yield folder, folder.lstat()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            yield path, path.lstat()


def _is_private(gid: int, owner: str) -> bool:
    try:
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:
        return False
    members |= {account.pw_name for account in pwd.getpwall() if account.pw_gid == gid}
    return members == {owner}
