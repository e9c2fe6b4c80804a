"""Content of files that may have to come back, by SHA-256.

One store for backups and for the undo of a change under way: the same module, initramfs
or modules.dep is kept once, and every restore is checked against its name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from gpuguard.errors import RollbackError, StateError
from gpuguard.host import Host
from gpuguard.host.files import fsync_dir, make_dirs, sha256_file
from gpuguard.state import BACKUPS_DIR

OBJECTS_DIR = f"{BACKUPS_DIR}/objects"
_CHUNK = 1 << 20
_TAKE_ANOTHER = (
    "nothing was changed; take another one (gpuguard backups), or the distribution's own "
    "modules: dkms install --force"
)


class ObjectStore:
    """Files under ``backups/objects/<sha256>``, mode 0600, never inside a module tree."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def path(self, digest: str) -> Path:
        """Where the content with this digest is, or would be."""
        return self._host.path(f"{OBJECTS_DIR}/{digest}")

    def add(self, source: Path) -> str:
        """Keep a copy of a file's content durably; the answer is its SHA-256.

        Raises:
            StateError: no space, or the store cannot be written.
        """
        folder = self._host.path(OBJECTS_DIR)
        temporary = folder / f".incoming.{os.getpid()}"
        try:
            make_dirs(folder.parent)  # what there is may be listed by all, what is in it not read
            make_dirs(folder, mode=0o700)
            digest = _copy_hashed(source, temporary)
            # over one that is there, too: that may be damaged, and this one is not
            temporary.rename(self.path(digest))
            fsync_dir(folder)
        except OSError as error:
            raise StateError(
                f"cannot back up {source}: {error.strerror}",
                code="backup-failed",
                hint=f"make room on the disk that holds {BACKUPS_DIR}; nothing was changed",
            ) from error
        finally:
            with suppress(OSError):  # a signal, too, leaves nothing half-written behind
                temporary.unlink(missing_ok=True)
        return digest

    def verified(self, digest: str) -> Path:
        """The kept content, after checking that it still is what its name says.

        Raises:
            RollbackError: gone or damaged.
        """
        path = self.path(digest)
        try:
            intact = sha256_file(path) == digest
        except OSError as error:
            raise RollbackError(
                f"backup {path} cannot be read: {error.strerror}", hint=_TAKE_ANOTHER
            ) from error
        if not intact:
            raise RollbackError(
                f"backup {path} is damaged: its SHA-256 is not its name", hint=_TAKE_ANOTHER
            )
        return path

    def keep_only(self, digests: AbstractSet[str]) -> None:
        """Drop every content that nothing refers to."""
        folder = self._host.path(OBJECTS_DIR)
        if not folder.is_dir():
            return
        for entry in folder.iterdir():
            if entry.name not in digests:
                entry.unlink(missing_ok=True)


def _copy_hashed(source: Path, target: Path) -> str:
    digest = hashlib.sha256()
    with source.open("rb") as origin, target.open("wb") as sink:
        target.chmod(0o600)
        while chunk := origin.read(_CHUNK):
            digest.update(chunk)
            sink.write(chunk)
        sink.flush()
        os.fsync(sink.fileno())
    return digest.hexdigest()
