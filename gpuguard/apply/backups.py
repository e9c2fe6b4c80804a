"""Backups of what resolved before a change, one manifest each, outside every module tree.

A manifest names contents in the object store by SHA-256, so that ten backups of one
unchanged initramfs cost its size once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuguard.apply.journal import Journal
from gpuguard.apply.objects import ObjectStore
from gpuguard.apply.undo import FileBefore, look
from gpuguard.core.facts import Identity, KernelFacts
from gpuguard.errors import StateError, UsageError
from gpuguard.host import Host
from gpuguard.state import BACKUPS_DIR

_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BackedUpModule:
    """One module as it resolved: where it lay, what it was, its content."""

    name: str
    base_name: str
    path: str
    digest: str
    build_id: str | None
    identity: str
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What resolved for one kernel at one time.

    ``files`` are further files as they were: depmod configuration, initramfs, copies moved
    out of the module tree.
    """

    id: str
    release: str
    created: str
    reason: str
    modules: tuple[BackedUpModule, ...]
    files: tuple[FileBefore, ...] = ()
    sequence: int = 0  # order of making; a clock may go backwards

    @property
    def identity(self) -> str:
        """``patched``, ``stock``, ``mixed`` or ``missing``, over its modules."""
        kinds = {module.identity for module in self.modules}
        if not kinds:
            return Identity.MISSING.value
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def digests(self) -> frozenset[str]:
        """Contents it needs from the object store."""
        return frozenset(m.digest for m in self.modules) | {f.digest for f in self.files}


def take(
    host: Host, kernel: KernelFacts, *, reason: str, created: str, paths: Iterable[str] = ()
) -> Backup:
    """Back up what resolves for a kernel now, and further files that will be touched.

    Raises:
        StateError: it could not be kept; nothing else was changed.
    """
    store = ObjectStore(host)
    modules = []
    for module in kernel.modules:
        if module.file is None or not host.path(module.file.path).exists():
            continue  # modules.dep may name a file that somebody removed: nothing to keep
        modules.append(
            BackedUpModule(
                name=module.name,
                base_name=module.file.base_name,
                path=module.file.path,
                digest=store.add(host.path(module.file.path)),
                build_id=module.file.build_id,
                identity=module.identity.value,
                version=module.file.version,
            )
        )
    looks = [look(path, host, store) for path in paths]
    backup = Backup(
        id=_new_id(host, kernel.release, created),
        release=kernel.release,
        created=created,
        reason=reason,
        modules=tuple(modules),
        files=tuple(found for found in looks if isinstance(found, FileBefore)),
        sequence=max((backup.sequence for backup in list_backups(host)), default=0) + 1,
    )
    document = {"schema": _SCHEMA, **asdict(backup)}
    try:
        host.replace_file(_manifest(backup.id), json.dumps(document, indent=1).encode() + b"\n")
    except OSError as error:
        raise StateError(
            f"cannot write the manifest of backup {backup.id}: {error.strerror}",
            code="backup-failed",
            hint=f"make room on the disk that holds {BACKUPS_DIR}; nothing was changed",
        ) from error
    return backup


def discard(host: Host, backup_id: str) -> None:
    """Drop a backup of a change that did not happen; its contents go with the next prune."""
    host.remove_file(_manifest(backup_id))


def list_backups(host: Host, release: str | None = None) -> tuple[Backup, ...]:
    """Backups of one release or of all, oldest first.

    Raises:
        StateError: a manifest cannot be read.
    """
    folder = host.path(BACKUPS_DIR)
    try:
        paths = [path for path in folder.iterdir() if path.suffix == ".json"]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise StateError(
            f"{folder} cannot be read: {error.strerror}",
            code="backup-unreadable",
            hint="run gpuguard with sudo",
        ) from error
    found = [_read(path) for path in paths]
    wanted = [backup for backup in found if release is None or backup.release == release]
    return tuple(sorted(wanted, key=_age))


def get_backup(host: Host, backup_id: str) -> Backup:
    """One backup by its id.

    Raises:
        UsageError: there is none.
    """
    for backup in list_backups(host):
        if backup.id == backup_id:
            return backup
    raise UsageError(
        f"there is no backup {backup_id}", code="no-such-backup", hint="see: gpuguard backups"
    )


def superfluous(
    backups: Iterable[Backup], *, keep: int, gone: AbstractSet[str] = frozenset()
) -> tuple[Backup, ...]:
    """What retention drops: all but the newest ``keep`` of each kernel, all of a gone one.

    The newest patched and the newest stock backup of a kernel always stay, however old:
    they are the way back.
    """
    by_release: dict[str, list[Backup]] = defaultdict(list)
    for backup in sorted(backups, key=_age, reverse=True):
        by_release[backup.release].append(backup)
    dropped = []
    for release, newest_first in by_release.items():
        ways_back = {
            next((b.id for b in newest_first if b.identity == kind), None)
            for kind in (Identity.PATCHED, Identity.STOCK)
        }
        kept = newest_first[:keep] if release not in gone else []
        dropped += [
            backup
            for backup in newest_first
            if backup not in kept and (release in gone or backup.id not in ways_back)
        ]
    return tuple(dropped)


def prune(host: Host, *, keep: int, gone: AbstractSet[str] = frozenset()) -> tuple[Backup, ...]:
    """Drop superfluous backups and contents that nothing refers to; returns the dropped."""
    if Journal(host).read() is not None:
        return ()  # an interrupted change still needs its contents
    dropped = superfluous(list_backups(host), keep=keep, gone=gone)
    for backup in dropped:
        host.remove_file(_manifest(backup.id))
    needed: set[str] = set()
    for backup in list_backups(host):
        needed |= backup.digests
    ObjectStore(host).keep_only(needed)
    return dropped


def _age(backup: Backup) -> tuple[int, str, str]:
    return (backup.sequence, backup.created, backup.id)


def _new_id(host: Host, release: str, created: str) -> str:
    stamp = created.replace("-", "").replace(":", "")
    candidate, count = f"{stamp}-{release}", 1
    while host.path(_manifest(candidate)).exists():
        count += 1
        candidate = f"{stamp}.{count}-{release}"
    return candidate


def _manifest(backup_id: str) -> str:
    return f"{BACKUPS_DIR}/{backup_id}.json"


def _read(path: Path) -> Backup:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        if document["schema"] != _SCHEMA:
            raise ValueError(f"schema {document['schema']}")  # noqa: TRY301 - one reaction
        return Backup(
            id=document["id"],
            release=document["release"],
            created=document["created"],
            reason=document["reason"],
            modules=tuple(BackedUpModule(**module) for module in document["modules"]),
            files=tuple(FileBefore(**file) for file in document["files"]),
            sequence=int(document.get("sequence", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"backup manifest {path} cannot be read: {error}",
            code="backup-unreadable",
            hint=f"move it away to go on without it: mv {path} {path}.broken",
        ) from error
