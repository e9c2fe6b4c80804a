"""The maintenance window: lift our holds, let apt install, rebuild, look, hold again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from gpuguard.apply.apt import AptLog, install, new_log
from gpuguard.apply.bootdefault import Settled, settle_boot_default
from gpuguard.apply.lock import wait_for_package_tools
from gpuguard.build.prebuilt import keep_only
from gpuguard.build.progress import Progress
from gpuguard.config import Config
from gpuguard.core.assess import assess
from gpuguard.core.plan import Leave, Rebuild, Request
from gpuguard.core.upgrade import MENDING, Change
from gpuguard.errors import CommandError, GpuguardError, PreflightError, StateError
from gpuguard.host import Host
from gpuguard.host.signals import HeldSignals
from gpuguard.probes import apt
from gpuguard.proof import boot_id
from gpuguard.state import QUEUE_FILE
from gpuguard.verbs import reboot_hold
from gpuguard.verbs.clock import now
from gpuguard.verbs.holds import HoldChange, hold_again, lift_for_window
from gpuguard.verbs.inspect import look, make_plan, policy_of
from gpuguard.verbs.rebuild import Outcome, left_unready, rebuild, worst_exit_status
from gpuguard.verbs.upgrade_preflight import Preflight, apt_words
from gpuguard.verbs.window import finish_packages, installed_changes, restore_marks, settle
from gpuguard.window import (
    FOLLOWED,
    Phase,
    Window,
    WindowBuild,
    copy_window,
    drop_window,
    new_id,
    read_window,
    write_window,
)

_DPKG_STATUS = "/var/lib/dpkg/status"
_UNCONFIGURED = (
    "a package that fails again is that package's trouble; once that is mended:\n" + MENDING
)


class Listener(Protocol):
    """Told how a window goes; ``line`` and ``waiting`` come from another thread."""

    def line(self, text: str) -> None:
        """A line of apt's and dpkg's output."""

    def waiting(self) -> None:
        """Somebody wants us to end; dpkg is let finish first."""

    def outcome(self, outcome: Outcome) -> None:
        """What became of one kernel."""

    def stopped(self, report: Report) -> None:
        """Somebody has ended us: how far it came. All is held again."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What a window did. ``error``: what failed first; the window was closed all the same.

    ``problems``: what failed besides. ``unfinished``: what dpkg says is half done. ``installed``:
    which of the planned changes have come about.
    """

    window: Window
    outcomes: list[Outcome] = field(default_factory=list)
    unready: dict[str, tuple[str, ...]] = field(default_factory=dict)
    error: GpuguardError | None = None
    problems: list[GpuguardError] = field(default_factory=list)
    holds: HoldChange | None = None
    settled: Settled | None = None
    unfinished: str = ""
    installed: tuple[Change, ...] = ()
    running: str | None = None

    @property
    def exit_status(self) -> int:
        """That of what failed first; without it 0, or 1 if the next boot is not safe."""
        for error in (self.error, *self.problems):
            if error is not None:
                return error.exit_status
        worst = worst_exit_status(self.outcomes, {})
        return worst or (os.EX_OK if self.window.reboot_safe else 1)


@contextmanager
def noted_preflight(host: Host) -> Iterator[None]:
    """While it is looked and tried, a record says so; not over one that waits for its boot.

    Raises:
        StateError: the record cannot be read or written.
    """
    if read_window(host) is not None:
        yield
        return
    started = now()
    window = Window(id=new_id(host, started), started=started, boot_id=boot_id(host))
    write_window(host, window.entering(Phase.PREFLIGHT, started))
    try:
        yield
    finally:
        drop_window(host)


def carry_out(
    host: Host, config: Config, preflight: Preflight, progress: Progress, listener: Listener
) -> Report:
    """Do what a preflight found good. Whatever happens, the holds are there again at the end.

    The caller holds the lock, and has recovered what an earlier run left.

    Raises:
        StateError: the record cannot be written; then nothing has begun.
        Interrupted, KeyboardInterrupt: after holding again.
    """
    return _Work(host, config, preflight, progress, listener).run()


class _Work:
    def __init__(
        self,
        host: Host,
        config: Config,
        preflight: Preflight,
        progress: Progress,
        listener: Listener,
    ) -> None:
        self._host, self._config, self._preflight = host, config, preflight
        self._progress, self._listener = progress, listener
        started = now()
        window = Window(
            id=new_id(host, started),
            started=started,
            boot_id=boot_id(host),
            requested=preflight.upgrade.requested,
            changes=preflight.upgrade.changes,
            driver=preflight.upgrade.driver_version,
            automatic=preflight.automatic,
        )
        self._log: AptLog = new_log(host, window.id)
        self._report = Report(window=replace(window, log=self._log.inside))
        self._has_finished = False

    def run(self) -> Report:
        """All steps; every way out leads through ``_end``."""
        self._put_aside()
        self._ask_for_a_run()
        try:
            with reboot_hold.while_window(self._host, self._config):
                self._enter(Phase.LIFTED)
                if self._install():
                    self._rebuild()
        except GpuguardError as error:
            self._failed(error)
        except OSError as error:
            self._failed(_unwritable(error))
        except BaseException as error:
            with HeldSignals():  # people press Ctrl-C twice
                self._end("interrupted", f"stopped by {type(error).__name__}")
                with suppress(OSError):  # a terminal that is gone
                    self._listener.stopped(self._report)
            raise
        with HeldSignals():
            failure = self._report.error
            self._end("failed" if failure else "done", failure.message if failure else "")
        return self._report

    def _put_aside(self) -> None:
        """A window that still waits for its boot: this one's boot will be its boot, too.

        Unless this one brings nothing: then ``settle`` lets it wait again.
        """
        waiting = read_window(self._host)
        if waiting is not None:
            note = f"{FOLLOWED}{self._report.window.id} before the boot"
            message = "; ".join(filter(None, (waiting.message, note)))
            copy_window(self._host, replace(waiting, message=message, phase=Phase.CLOSED))
            self._report.window = replace(self._report.window, follows=waiting.id)

    def _ask_for_a_run(self) -> None:
        """Should we be killed: an automatic run waits for our lock, and holds again at once.

        Raises:
            StateError: it cannot be asked for; nothing has begun.
        """
        try:
            self._host.replace_file(QUEUE_FILE, b"")
        except OSError as error:
            raise StateError(
                f"{QUEUE_FILE} cannot be written: {error.strerror}",
                code="state-unwritable",
                hint="see that the disk is writable and not full; nothing was changed",
            ) from error

    def _enter(self, phase: Phase) -> None:
        window = self._report.window.entering(phase, now())
        write_window(self._host, window)
        self._report.window = window

    def _failed(self, error: GpuguardError) -> None:
        if self._report.error is None:
            self._report.error = error
        else:
            self._report.problems.append(error)

    def _install(self) -> bool:
        """Let apt work; True if something may be installed now."""
        self._progress.step("holds", "lifted for this window", None)
        lift_for_window(self._host, timeout=self._config.lock_timeout_seconds)
        words = apt_words(self._preflight.wish, self._preflight.upgrade.requested)
        if apt.simulate(self._host, words, _DPKG_STATUS) != self._preflight.upgrade.changes:
            raise PreflightError(
                "apt would do something else now than what was looked at",
                code="plan-changed",
                hint="its lists or the installed packages have changed meanwhile; run gpuguard "
                "upgrade once more",
            )
        removes = any(change.is_removal for change in self._preflight.upgrade.changes)
        self._enter(Phase.INSTALLING)
        self._progress.step("install", f"{len(self._preflight.upgrade.versions)} packages", None)
        try:
            install(
                self._host,
                words if removes else ("--no-remove", *words),
                self._log,
                lock_timeout=self._config.lock_timeout_seconds,
                on_line=self._listener.line,
                on_signal=self._listener.waiting,
            )
        except CommandError as error:
            self._failed(error)
            self._finish()
            if self._report.unfinished:
                error.hint = f"{_UNCONFIGURED}\n{error.hint}"
        restore_marks(self._host, self._report.window)
        return bool(installed_changes(self._host, self._report.window))

    def _finish(self) -> None:
        """Once for each window: what apt left half done, before it is held again."""
        if self._has_finished:
            return
        self._has_finished = True
        self._report.unfinished = finish_packages(
            self._host, self._report.window, self._config.lock_timeout_seconds, self._log
        )

    def _rebuild(self) -> None:
        self._enter(Phase.REBUILDING)
        host, config, report = self._host, self._config, self._report
        wait_for_package_tools(host, config.lock_timeout_seconds)
        planned = make_plan(host, config, Request(automatic=True))
        builds = [s for s in planned.plan.steps if isinstance(s, Rebuild) and not s.blockers]
        with reboot_hold.while_building(host, config, tuple(step.release for step in builds)):
            for outcome in rebuild(host, config, planned, self._progress):
                report.outcomes.append(outcome)
                self._listener.outcome(outcome)
        report.unready = left_unready(host, config, report.outcomes)
        report.window = replace(report.window, builds=tuple(map(_build, report.outcomes)))

    def _end(self, outcome: str, message: str) -> None:
        """Hold again, look at the next boot, and record how it is.

        What fails here is told and leaves the record open: the next start holds again.
        """
        report = self._report
        try:
            self._enter(Phase.HOLDING)
        except GpuguardError as error:  # a full disk: all the more
            self._failed(error)
        try:
            if any(phase == Phase.INSTALLING for phase, _ in report.window.phases):
                self._finish()
            report.holds = hold_again(self._host, self._config)
            self._settle_boot_default()
            self._look()
            report.window = replace(report.window, outcome=outcome, message=message)
            report.window = settle(self._host, report.window)
            if outcome == "done":
                keep_only(self._host, ())
        except GpuguardError as error:
            self._failed(error)
        except OSError as error:
            self._failed(_unwritable(error))

    def _settle_boot_default(self) -> None:
        """If the new kernel cannot be made ready after all, the last good one boots."""
        facts = look(self._host, self._config, with_p2p=False)
        try:
            self._report.settled = settle_boot_default(self._host, self._config, facts, "window")
        except GpuguardError as error:
            self._failed(error)

    def _look(self) -> None:
        """What would the next boot start, and would it have P2P."""
        report = self._report
        facts = look(self._host, self._config, with_p2p=False)
        assessment = assess(facts, policy_of(self._config))
        report.unfinished = apt.unfinished(self._host)
        report.installed = installed_changes(self._host, report.window)
        reasons = list(assessment.reboot.reasons)
        if report.unfinished:
            reasons.insert(0, "not safe: packages are half installed or half configured")
        report.running = facts.running
        report.window = replace(
            report.window,
            next_release=facts.next.release,
            reboot_safe=assessment.reboot.safe and not report.unfinished,
            reasons=tuple(reasons),
            unfinished=report.unfinished,
            held=report.holds.held if report.holds is not None else (),
        )
        try:
            reboot_hold.settle(self._host, self._config, facts, assessment)
        except GpuguardError as error:
            report.problems.append(error)


def _unwritable(error: OSError) -> StateError:
    return StateError(
        f"{error.filename or 'a file'}: {error.strerror}",
        code="state-unwritable",
        hint="see that the disk is writable and not full (df -h), then: gpuguard rebuild",
    )


def _build(outcome: Outcome) -> WindowBuild:
    error = outcome.error
    return WindowBuild(
        release=outcome.step.release,
        ok=error is None,
        code=error.code if error is not None else "",
        message=error.message
        if error is not None
        else (outcome.step.reason if isinstance(outcome.step, Leave) else ""),
    )
