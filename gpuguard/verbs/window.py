"""Ends of a maintenance window that its own process does not see: a crash, and the next boot."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from gpuguard.apply.apt import AptLog, finish, mark_automatic, new_log
from gpuguard.apply.bootdefault import settle_boot_default
from gpuguard.config import Config
from gpuguard.core.releases import release_key
from gpuguard.core.upgrade import Change, Upgrade
from gpuguard.errors import CommandError, GpuguardError
from gpuguard.host import Host
from gpuguard.probes import apt
from gpuguard.probes.dpkg import read_packages
from gpuguard.probes.driver import probe_driver
from gpuguard.probes.kernels import probe_running
from gpuguard.proof import boot_id
from gpuguard.verbs.clock import now
from gpuguard.verbs.holds import HoldChange, hold_again
from gpuguard.verbs.inspect import look
from gpuguard.window import (
    Phase,
    Window,
    WindowBoot,
    copy_window,
    drop_window,
    file_window,
    list_windows,
    read_window,
    restore_window,
    write_window,
)

_LOCK_SECONDS = 60.0
_KEPT_BOOTS = 19


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
    timeout = config.lock_timeout_seconds if config is not None else _LOCK_SECONDS
    unfinished = finish_packages(host, window, timeout)
    holds = hold_again(host, config)
    restore_marks(host, window)
    if config is not None:
        with suppress(GpuguardError):  # what boots next is judged all the same
            settle_boot_default(host, config, look(host, config, with_p2p=False), "window")
    message = f"interrupted while {phase.value}"
    ended = replace(
        window, outcome="interrupted", message=message, held=_held(host, window),
        unfinished=unfinished,
    )  # fmt: skip
    return RecoveredWindow(window=settle(host, ended), phase=phase, holds=holds)


def finish_packages(
    host: Host, window: Window, lock_timeout: float, log: AptLog | None = None
) -> str:
    """Let apt end what a window left half done, while the holds are off; what is still half done.

    Held again in the middle, packages could neither be configured (their dependencies are not
    there) nor mended (they are on hold). Only if nothing is removed, and all that is half done
    or would change is the window's own. A failure is in what is left.
    """
    with suppress(GpuguardError):
        if not (before := apt.unfinished(host)):
            return ""
        words = tuple(f"{c.name}={c.new}" for c in window.changes if c.new is not None)
        if _may_finish(host, window, words):
            finish(host, words, log or new_log(host, window.id), lock_timeout=lock_timeout)
            restore_marks(host, window, *_came_along(window))
            return apt.unfinished(host)
        return before
    return "it could not be looked at: see dpkg --audit, and apt-get check"


def _came_along(window: Window) -> tuple[str, ...]:
    """New packages that nobody has named."""
    named = {word.partition("=")[0] for word in window.requested}
    return tuple(c.name for c in window.changes if c.old is None and c.name not in named)


def _may_finish(host: Host, window: Window, words: tuple[str, ...]) -> bool:
    own = {change.name: change.new for change in window.changes}
    half_done = {
        name for name, p in read_packages(host).items() if not (p.is_installed or p.is_gone)
    }
    if not half_done <= own.keys():
        return False
    if apt.has_pending_updates(host):
        return True  # apt says nothing before dpkg --configure -a
    changes = apt.would_finish(host, words)
    return changes is not None and all(
        change.new is not None and own.get(change.name) == change.new for change in changes
    )


def settle(host: Host, window: Window) -> Window:
    """Record the end of the work: it waits for the next boot if that is to bring anything new.

    A window that it had put aside, and that still waits for its boot, goes on waiting: as a part
    of this one, or by itself if this one brought nothing.

    Raises:
        StateError: it cannot be written.
    """
    kernels, driver = _brought(host, window)
    if kernels or driver is not None:
        before = next((w for w in list_windows(host) if w.id == window.follows), None)
        if before is not None:
            others, other_driver = awaited(host, before)
            kernels, driver = (*others, *kernels), driver or other_driver
        kernels = tuple(sorted(dict.fromkeys(kernels), key=release_key))
        waiting = replace(window, awaits_kernels=kernels, awaits_driver=driver)
        waiting = waiting.entering(Phase.WAITING, now())
        write_window(host, waiting)
        return waiting
    closed = window.entering(Phase.CLOSED, now())
    if window.follows:
        copy_window(host, closed)
        if restore_window(host, window.follows) is not None:
            return closed
    file_window(host, closed)
    return closed


def _brought(host: Host, window: Window) -> tuple[tuple[str, ...], str | None]:
    upgrade = Upgrade(changes=installed_changes(host, window))
    return (*upgrade.new_kernels, *upgrade.renewed_kernels), upgrade.driver_version


def awaited(host: Host, window: Window) -> tuple[tuple[str, ...], str | None]:
    """Kernels of which one, and the driver that, must come up; older records do not say it."""
    if window.awaits_kernels or window.awaits_driver is not None:
        return window.awaits_kernels, window.awaits_driver
    return _brought(host, window)


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

    A boot of another kernel or driver than it brought proves nothing about it: that boot is
    recorded, and the window goes on waiting.

    Args:
        host: where.
        verdict: the gate's, in one word.
        proof: what was proven (``PROOF_FILE``); None if nothing was.

    Returns:
        The window as it is recorded now: closed, or still waiting.

    Raises:
        StateError: the record cannot be read or written.
        ProbeError: what is running cannot be read.
    """
    window = read_window(host)
    if window is None or window.phase is not Phase.WAITING:
        return None
    present = boot_id(host)
    if window.boot_id and window.boot_id == present:
        return None  # verified by hand before the reboot
    running, driver = probe_running(host), probe_driver(host, {}).loaded
    if not _is_awaited(host, window, running, driver):
        others = tuple(boot for boot in window.boots if boot.boot_id != present)
        boot = WindowBoot(at=now(), boot_id=present, release=running, driver=driver)
        waiting = replace(window, boots=(*others[-_KEPT_BOOTS:], boot))
        write_window(host, waiting)
        return waiting
    closed = replace(window.entering(Phase.CLOSED, now()), verdict=verdict, proof=proof)
    file_window(host, closed)
    return closed


def _is_awaited(host: Host, window: Window, running: str | None, driver: str | None) -> bool:
    kernels, awaited_driver = awaited(host, window)
    if awaited_driver not in (None, driver):
        return False
    if not kernels:
        return True
    # By the operator's choice another kernel boots by default, and all was ready for it.
    chosen = window.outcome == "done" and all(build.ok for build in window.builds)
    if running is None:
        return False
    return running in kernels or (chosen and running == window.next_release)


def waits_for(host: Host, window: Window) -> str:
    """``kernel 6.1.0-50-amd64 and driver 580.1.2``."""
    kernels, driver = awaited(host, window)
    words = [f"kernel {' or '.join(kernels)}"] if kernels else []
    return " and ".join([*words, *([f"driver {driver}"] if driver else [])])


def restore_marks(host: Host, window: Window, *more: str) -> None:
    """Packages that came by themselves count so again: else old kernels would stay for ever."""
    packages = read_packages(host)
    names = [
        name
        for name in (*window.automatic, *more)
        if name in packages and not packages[name].is_gone
    ]
    with suppress(CommandError):  # costs an autoremove, not the window
        mark_automatic(host, names)


def _held(host: Host, window: Window) -> tuple[str, ...]:
    packages = read_packages(host)
    names = [change.name for change in window.changes]
    return tuple(name for name in names if name in packages and packages[name].is_held)
