"""The maintenance window's record: on disk before each of its steps, so that any end is noticed.

At most one is open or waits for its boot (``WINDOW_FILE``); those that are closed are kept, one
file each (``WINDOWS_DIR``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpuguard.core.upgrade import Change
from gpuguard.errors import StateError
from gpuguard.host import Host
from gpuguard.state import WINDOW_FILE, WINDOWS_DIR

_SCHEMA = 1
FOLLOWED = "followed by "  # how a window that is put aside says so


class Phase(StrEnum):
    """What is being done; written before it is begun."""

    PREFLIGHT = "preflight"
    LIFTED = "lifted"
    INSTALLING = "installing"
    REBUILDING = "rebuilding"
    HOLDING = "holding"
    WAITING = "waiting-for-boot"
    CLOSED = "closed"

    @property
    def is_open(self) -> bool:
        """True while a process should be at work on it."""
        return self not in (Phase.WAITING, Phase.CLOSED)

    @property
    def holds_are_off(self) -> bool:
        """True if our holds may be lifted."""
        return self.is_open and self is not Phase.PREFLIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBuild:
    """What became of one kernel: ``code`` and ``message`` are of its error, if any."""

    release: str
    ok: bool
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBoot:
    """A boot that was not the one that a window waits for."""

    at: str
    boot_id: str
    release: str | None
    driver: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One maintenance window. Times are RFC 3339, UTC.

    ``outcome`` is empty while it is open, then ``done``, ``failed`` or ``interrupted``, and
    ``message`` says why. ``automatic``: packages that apt had marked as installed automatically.
    ``verdict`` and ``proof`` are the gate's after the boot that the window waited for.
    ``awaits_kernels`` and ``awaits_driver``: one of these kernels, and this driver, have to come
    up; ``boots``: others that came up meanwhile. ``follows``: the window whose boot this one's
    boot will be, too. ``unfinished``: what is half done at the end, as dpkg or apt says it.
    """

    id: str
    started: str
    phase: Phase = Phase.PREFLIGHT
    phases: tuple[tuple[str, str], ...] = ()  # (phase, when it was entered)
    boot_id: str = ""
    requested: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    driver: str | None = None
    automatic: tuple[str, ...] = ()
    log: str = ""
    outcome: str = ""
    message: str = ""
    builds: tuple[WindowBuild, ...] = ()
    held: tuple[str, ...] = ()
    next_release: str | None = None
    reboot_safe: bool | None = None
    reasons: tuple[str, ...] = ()
    verdict: str | None = None
    proof: Mapping[str, Any] | None = None
    awaits_kernels: tuple[str, ...] = ()
    awaits_driver: str | None = None
    boots: tuple[WindowBoot, ...] = ()
    follows: str = ""
    unfinished: str = ""

    def entering(self, phase: Phase, when: str) -> Window:
        """The record for a phase that is about to begin."""
        return replace(self, phase=phase, phases=(*self.phases, (phase.value, when)))

    @property
    def since(self) -> str:
        """When the present phase began."""
        return self.phases[-1][1] if self.phases else self.started


def read_window(host: Host) -> Window | None:
    """The window that is open or waits for its boot, if any.

    Raises:
        StateError: there is a record, and it cannot be read.
    """
    return _read(host.path(WINDOW_FILE))


def write_window(host: Host, window: Window) -> None:
    """Put the record on disk, durably, in one step.

    Raises:
        StateError: it cannot be written; what was to follow must not begin.
    """
    _write(host, WINDOW_FILE, window)


def file_window(host: Host, window: Window) -> None:
    """Move a record to those that are closed. Twice is the same as once.

    Raises:
        StateError: it cannot be written.
    """
    copy_window(host, window)
    _remove(host, WINDOW_FILE)


def copy_window(host: Host, window: Window) -> None:
    """Put a record among those that are closed; ``WINDOW_FILE`` stays as it is.

    Raises:
        StateError: it cannot be written.
    """
    _write(host, _filed(window.id), window)


def restore_window(host: Host, name: str) -> Window | None:
    """Let a window wait for its boot again that ``copy_window`` had put aside.

    Raises:
        StateError: a record cannot be read or written.
    """
    aside = _read(host.path(_filed(name)))
    if aside is None:
        return None
    message = "; ".join(p for p in aside.message.split("; ") if not p.startswith(FOLLOWED))
    waiting = replace(aside, phase=Phase.WAITING, message=message)
    write_window(host, waiting)
    _remove(host, _filed(name))
    return waiting


def drop_window(host: Host) -> None:
    """Forget the record: nothing has happened.

    Raises:
        StateError: it cannot be removed.
    """
    _remove(host, WINDOW_FILE)


def list_windows(host: Host) -> tuple[Window, ...]:
    """Closed windows, oldest first.

    Raises:
        StateError: a record cannot be read.
    """
    folder = host.path(WINDOWS_DIR)
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return tuple(window for path in paths if (window := _read(path)) is not None)


def new_id(host: Host, started: str) -> str:
    """A name for a window that no other has."""
    stamp = started.replace("-", "").replace(":", "")
    candidate, count = stamp, 1
    while host.path(f"{WINDOWS_DIR}/{candidate}.json").exists():
        count += 1
        candidate = f"{stamp}.{count}"
    return candidate


def window_document(window: Window) -> dict[str, Any]:
    """The record as JSON; see docs/json.md."""
    document = asdict(window)
    document["phases"] = [{"phase": phase, "at": when} for phase, when in window.phases]
    return {"schema": _SCHEMA, **document}


def _filed(name: str) -> str:
    return f"{WINDOWS_DIR}/{name}.json"


def _remove(host: Host, path: str) -> None:
    try:
        host.remove_file(path)
    except OSError as error:
        raise _unwritable(path, "removed", error) from error


def _unwritable(path: str, what: str, error: OSError) -> StateError:
    return StateError(
        f"{path} cannot be {what}: {error.strerror}",
        code="state-unwritable",
        hint="see that the disk is writable and not full",
    )


def _write(host: Host, path: str, window: Window) -> None:
    content = json.dumps(window_document(window), indent=1).encode() + b"\n"
    try:
        host.replace_file(path, content)
    except OSError as error:
        raise _unwritable(path, "written", error) from error


def _read(path: Path) -> Window | None:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        if document["schema"] != _SCHEMA:
            raise ValueError(f"schema {document['schema']}")  # noqa: TRY301 - one reaction
        return _decoded(document)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"the maintenance window's record {path} cannot be used: {error}",
            code="window-unreadable",
            hint=f"see that everything is on hold again (gpuguard hold), then move it away: {path}",
        ) from error


def _decoded(document: dict[str, Any]) -> Window:
    known = {name: document[name] for name in Window.__dataclass_fields__ if name in document}
    lists = ("requested", "automatic", "held", "reasons", "awaits_kernels")
    return Window(**{
        **known,
        **{name: tuple(map(str, known.get(name, ()))) for name in lists},
        "phase": Phase(known["phase"]),
        "phases": tuple((p["phase"], p["at"]) for p in known.get("phases", ())),
        "changes": tuple(Change(**change) for change in known.get("changes", ())),
        "boots": tuple(WindowBoot(**boot) for boot in known.get("boots", ())),
        "builds": tuple(WindowBuild(**build) for build in known.get("builds", ())),
    })  # fmt: skip
