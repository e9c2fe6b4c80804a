"""Is there room on disk for a change, its backup and its undo: asked before anything is begun."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from gpuguard.apply.actions import (
    Action,
    CheckInitramfs,
    CheckNextKernel,
    CheckResolved,
    Depmod,
    PutFile,
    RebuildInitramfs,
    RemoveFile,
    UpdateBootMenu,
)
from gpuguard.apply.execute import DEPMOD_OUTPUTS
from gpuguard.core.facts import KernelFacts
from gpuguard.errors import PreflightError
from gpuguard.host import Host
from gpuguard.state import BACKUPS_DIR, DEPMOD_DIR, module_tree

_BLOCK = 4096  # a file takes whole ones
_SLACK = 1 << 20  # journal, manifest, folders, what others write meanwhile


def check_room(actions: Sequence[Action], host: Host, kernel: KernelFacts) -> None:
    """Compare what a change of one kernel may write with what is free, per file system.

    Room in ``/boot`` is the business of ``check_initramfs_possible``.

    Raises:
        PreflightError: ``disk-space``.
    """
    needs: dict[int, int] = defaultdict(int)
    places: dict[int, str] = {}
    for place, size in (*_backup(host, kernel), *(n for a in actions for n in _needs(a, host))):
        device = _existing(host, place).stat().st_dev
        needs[device] += -(-size // _BLOCK) * _BLOCK
        places.setdefault(device, place)
    for device, size in needs.items():
        status = os.statvfs(_existing(host, places[device]))
        needed, free = size + _SLACK, status.f_bavail * status.f_frsize
        if free < needed:
            raise PreflightError(
                f"{kernel.release}: {_mib(needed)} MiB needed in {places[device]}, "
                f"{_mib(free)} MiB free",
                code="disk-space",
                hint="make room (apt autoremove --purge, apt clean) and try again",
            )


def check_writable(host: Host, kernel: KernelFacts) -> None:
    """Before anything is begun: everything that a change writes can be written.

    Raises:
        PreflightError: ``read-only``.
    """
    places = [module_tree(kernel.release), DEPMOD_DIR, BACKUPS_DIR]
    if kernel.initramfs.modules and kernel.initramfs.path is not None:
        places.append(str(PurePosixPath(kernel.initramfs.path).parent))
    for place in places:
        real = _existing(host, place)
        if not os.access(real, os.W_OK):
            raise PreflightError(
                f"{kernel.release}: {host.inside(real)} cannot be written",
                code="read-only",
                hint="is its file system mounted read-only? mount -o remount,rw, then try again",
            )


def _backup(host: Host, kernel: KernelFacts) -> Iterator[tuple[str, int]]:
    for module in kernel.modules:
        if module.file is not None:
            yield BACKUPS_DIR, _size(host.path(module.file.path))


def _needs(action: Action, host: Host) -> Iterator[tuple[str, int]]:
    """Folder and bytes of every file that an action writes, and of the copy for its undo."""
    match action:
        case PutFile():
            new = action.source
            size = len(new) if isinstance(new, bytes) else _size(new)
            yield str(PurePosixPath(action.path).parent), size
            yield BACKUPS_DIR, _size(host.path(action.path))
        case RemoveFile():
            yield BACKUPS_DIR, _size(host.path(action.path))
        case Depmod():
            for name in DEPMOD_OUTPUTS:
                tree = module_tree(action.release)
                size = _size(host.path(f"{tree}/{name}"))
                yield tree, size
                yield BACKUPS_DIR, size
        case RebuildInitramfs():
            yield BACKUPS_DIR, _size(host.path(action.path))
        case UpdateBootMenu():
            yield BACKUPS_DIR, _size(host.path(action.path))
        case CheckResolved() | CheckInitramfs() | CheckNextKernel():
            pass


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _existing(host: Host, place: str) -> Path:
    real = host.path(place)
    while not real.exists():
        real = real.parent
    return real


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f}"
