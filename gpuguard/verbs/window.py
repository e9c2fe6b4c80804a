"""Ends of a maintenance window that its own process does not see: a crash, and the next boot."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from gpuguard.apply.apt import mark_automatic
from gpuguard.apply.bootdefault import settle_boot_default
from gpuguard.config import Config
from gpuguard.core.upgrade import Change, Upgrade
from gpuguard.errors import CommandError, GpuguardError
from gpuguard.host import Host
from gpuguard.probes.dpkg import read_packages
from gpuguard.proof import boot_id
from gpuguard.verbs.clock import now
from gpuguard.verbs.holds import HoldChange, hold_again
from gpuguard.verbs.inspect import look
from gpuguard.window import (
    Phase,
    Window,
    drop_window,
    file_window,
    read_window,
    write_window,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredWindow:
    """A window whose process was gone, as it is recorded now, and what was held again."""

    window: Window
    phase: Phase  # that it was interrupted in
    holds: HoldChange = field(default_factory=HoldChange)


def recover_window(host: Host, config: Config | None) -> RecoveredWindow | None:
    """Close a window that was interrupted: what it lifted is held again. Idempotent.

    For every verb that changes a host; the caller holds the lock, so nobody is at work on it,
    and has waited until apt and dpkg are idle, which may have outlived the window.

    Raises:
        StateError: the record cannot be read or written.
        LockHeldError, CommandError, VerifyError: holding failed; the next start tries again.
    """
    window = read_window(host)
    if window is None or not window.phase.is_open:
        return None
    phase = window.phase
    if phase is Phase.PREFLIGHT:
        drop_window(host)
        return RecoveredWindow(window=window, phase=phase)
    holds = hold_again(host, config)
    restore_marks(host, window)
    if config is not None:
        with suppress(GpuguardError):  # what boots next is judged all the same
            settle_boot_default(host, config, look(host, config, with_p2p=False), "window")
    message = f"interrupted while {phase.value}"
    ended = replace(
        window, outcome="interrupted", message=message, held=_held(host, window)
    )  # fmt: skip
    return RecoveredWindow(window=settle(host, ended), phase=phase, holds=holds)


def settle(host: Host, window: Window) -> Window:
    """Record the end of the work: it waits for the next boot if that is to bring anything new.

    Raises:
        StateError: it cannot be written.
    """
    upgrade = Upgrade(changes=installed_changes(host, window))
    kernels = (*upgrade.new_kernels, *upgrade.renewed_kernels)
    if kernels or upgrade.driver_version is not None:
        waiting = window.entering(Phase.WAITING, now())
        write_window(host, waiting)
        return waiting
    closed = window.entering(Phase.CLOSED, now())
    file_window(host, closed)
    return closed


def installed_changes(host: Host, window: Window) -> tuple[Change, ...]:
    """Which of the planned changes have come about."""
    packages = read_packages(host)
    return tuple(
        change
        for change in window.changes
        if (p := packages.get(change.name)) is not None
        and change.new == p.version
        and not p.is_gone
    )


def close_after_boot(host: Host, verdict: str, proof: Mapping[str, Any] | None) -> Window | None:
    """The gate's word on the boot that a window has waited for; None if none did.

    Args:
        host: where.
        verdict: the gate's, in one word.
        proof: what was proven (``PROOF_FILE``); None if nothing was.

    Raises:
        StateError: the record cannot be read or written.
    """
    window = read_window(host)
    if window is None or window.phase is not Phase.WAITING:
        return None
    if window.boot_id and window.boot_id == boot_id(host):
        return None  # verified by hand before the reboot
    closed = replace(window.entering(Phase.CLOSED, now()), verdict=verdict, proof=proof)
    file_window(host, closed)
    return closed


def restore_marks(host: Host, window: Window) -> None:
    """Packages that came by themselves count so again: else old kernels would stay for ever."""
    packages = read_packages(host)
    names = [name for name in window.automatic if name in packages and not packages[name].is_gone]
    with suppress(CommandError):  # costs an autoremove, not the window
        mark_automatic(host, names)


def _held(host: Host, window: Window) -> tuple[str, ...]:
    packages = read_packages(host)
    names = [change.name for change in window.changes]
    return tuple(name for name in names if name in packages and packages[name].is_held)
