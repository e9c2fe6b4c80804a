"""What the last automatic run found and did: for the daemon, the hooks and a person at night.

The file's time of change is meaningful: nothing that changed before it is news to a hook.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from gpuguard.errors import StateError
from gpuguard.host import Host
from gpuguard.state import LAST_RUN_FILE

_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """One kernel in an automatic run; ``action`` is a word of the plan's, ``code`` of an error."""

    release: str
    action: str
    ok: bool
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """Times are UTC, ISO 8601. ``reboot_safe`` None: it could not be told.

    ``problems``: what else went wrong, one sentence each.
    """

    started: str
    finished: str
    exit_status: int
    kernels: tuple[KernelRun, ...] = ()
    next_release: str | None = None
    reboot_safe: bool | None = None
    problems: tuple[str, ...] = ()


def write_last_run(host: Host, run: LastRun, *, seen_until: float) -> None:
    """Remember a run.

    Args:
        host: where.
        run: what happened.
        seen_until: seconds since the epoch; what changed later may not have been seen.
    """
    document = {"schema": _SCHEMA, **asdict(run)}
    host.replace_file(LAST_RUN_FILE, json.dumps(document, indent=1).encode() + b"\n")
    with suppress(OSError):
        os.utime(host.path(LAST_RUN_FILE), (seen_until, seen_until))


def read_last_run(host: Host) -> LastRun | None:
    """The last automatic run; None: there was none.

    Raises:
        StateError: the file is there and cannot be understood.
    """
    path = host.path(LAST_RUN_FILE)
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        return LastRun(
            started=str(document["started"]),
            finished=str(document["finished"]),
            exit_status=int(document["exit_status"]),
            kernels=tuple(_kernel(kernel) for kernel in document["kernels"]),
            next_release=document.get("next_release"),
            reboot_safe=document.get("reboot_safe"),
            problems=tuple(map(str, document.get("problems", ()))),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path} cannot be used: {error}",
            hint="the next automatic run writes it anew: systemctl start gpuguard-rebuild",
        ) from error


def _kernel(document: dict[str, Any]) -> KernelRun:
    return KernelRun(
        release=str(document["release"]),
        action=str(document["action"]),
        ok=bool(document["ok"]),
        code=str(document.get("code", "")),
        message=str(document.get("message", "")),
    )
