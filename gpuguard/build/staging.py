"""The folder of one build, gone on every way out, and what dead runs left behind.

Layout: ``tree/`` the export, the build user's; ``tmp/`` the compiler's scratch files, the build
user's; ``patches/`` and ``out/`` root's own. A lock on the folder tells the living from the dead:
it goes with the process, kill -9 included, where a process id would be reused.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpuguard.build import cell
from gpuguard.host import BuildUser, Host
from gpuguard.host.signals import HeldSignals
from gpuguard.state import CACHE_DIR, STAGING_DIR


@dataclass(frozen=True, slots=True)
class Staging:
    """One build's folder; see the module for what is where.

    ``user`` compiles, in a group that only this build has (see ``cell``).
    """

    root: Path
    user: BuildUser | None

    @property
    def tree(self) -> Path:
        return self.root / "tree"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def own_folder(self, name: str, *, owner: BuildUser | None = None) -> Path:
        """Make a folder, for root or for another account."""
        folder = self.root / name
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)  # whatever the umask says: the build user must get in
        if owner is not None:
            os.chown(folder, owner.uid, owner.gid)
        return folder


@contextmanager
def staging(host: Host, release: str, user: BuildUser | None) -> Iterator[Staging]:
    """A fresh staging folder; removed when the context ends, whatever ends it."""
    parent = host.make_dir(STAGING_DIR)
    for folder in (host.path(CACHE_DIR), parent):
        with suppress(PermissionError):  # not ours: then it is as its owner wants it
            folder.chmod(0o755)
    remove_stale(parent)
    with HeldSignals() as held:  # a folder that is there will be removed
        root = Path(tempfile.mkdtemp(dir=parent, prefix=f"{release}."))
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            held.let_go()
            fcntl.flock(lock, fcntl.LOCK_EX)
            place = Staging(root, cell.enclose(root, user))
            own = place.user
            for name, owner in (("tree", own), ("tmp", own), ("patches", None), ("out", None)):
                place.own_folder(name, owner=owner)
            yield place
        finally:
            with HeldSignals():
                remove_tree(root)
                os.close(lock)


def remove_stale(parent: Path) -> tuple[str, ...]:
    """Remove the folders of runs that are gone; returns their names."""
    removed = []
    for folder in parent.iterdir():
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(folder)
            removed.append(folder.name)
        except BlockingIOError:
            continue  # a build is under way in it
        finally:
            os.close(lock)
    return tuple(removed)


def remove_tree(folder: Path) -> None:
    """Remove a tree, symlinks not followed; a source's read-only folders are no obstacle.

    What cannot be removed stays for the next start, rather than hiding why the build ended.
    """

    def retry(function: object, path: str, _: object) -> None:
        if os.geteuid() == 0:  # root is not stopped by modes, and must not follow paths here
            return
        with suppress(OSError):
            Path(path).parent.chmod(0o700)
            (os.rmdir if function is os.rmdir else os.unlink)(path)

    shutil.rmtree(folder, onerror=retry)
