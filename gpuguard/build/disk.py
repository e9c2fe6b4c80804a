"""Room on disk: enough before a build starts, and a clear error when it runs out after all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuguard.build.records import Blocker
from gpuguard.errors import CommandError, GpuguardError, StateError
from gpuguard.host import Host
from gpuguard.state import STAGING_DIR, module_tree

_MIB = 1 << 20
#: Multiples of the source's size (535.261.03: 81 MB), estimated on the generous side: the export
#: and its tar, objects of the kernel part with debug information, the core when it is built.
_EXPORTED, _COMPILED, _CORE, _MODULES = 2.0, 1.5, 1.5, 0.3
_BASE = 16 * _MIB


def blockers(host: Host, release: str, source_bytes: int, *, core_cached: bool) -> list[Blocker]:
    """What does not fit where; sizes are estimates from the source's size."""
    core = 0.0 if core_cached else _CORE
    staging = int(source_bytes * (_EXPORTED + _COMPILED + core)) + _BASE
    modules = int(source_bytes * _MODULES) + _BASE // 2
    found = []
    for place, need in ((STAGING_DIR, staging), (module_tree(release), modules)):
        free = _free(host.path(place))
        if free < need:
            found.append(
                Blocker(
                    code="disk-space",
                    message=f"{place} has {_mib(free)} MiB free, a build needs "
                    f"about {_mib(need)} MiB there",
                    hint="free some space on that file system",
                )
            )
    return found


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what the system says about files into errors with a code and a remedy.

    Raises:
        StateError: ``disk-full``, or ``staging-unwritable`` for anything else.
    """
    try:
        yield
    except CommandError as error:
        if os.strerror(errno.ENOSPC) in f"{error.message}\n{error.detail}":
            raise disk_full(error.message) from error
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(str(error.filename or STAGING_DIR)) from error
        raise StateError(
            f"the build's own files cannot be written or read: {error}",
            hint=f"check {STAGING_DIR} and its file system",
            code="staging-unwritable",
        ) from error


def disk_full(where: str) -> GpuguardError:
    """The error for a file system without room."""
    return StateError(
        f"no space left on the device while building ({where})",
        hint="free some space; nothing was installed and the staging folder is removed",
        code="disk-full",
    )


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize  # without root's reserve: the build user has none


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f}"
