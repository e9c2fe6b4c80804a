"""The run that nobody started: timer, path unit, hooks. The use case behind ``--automatic``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from gpuguard.apply.bootdefault import settle_boot_default
from gpuguard.build.progress import Progress
from gpuguard.config import Config
from gpuguard.core.assess import assess
from gpuguard.core.plan import Forget, Leave, Rebuild, RefreshInitramfs, Request
from gpuguard.errors import GpuguardError, unwritable
from gpuguard.host import Host
from gpuguard.last_run import KernelRun, LastRun, write_last_run
from gpuguard.state import QUEUE_FILE
from gpuguard.verbs import reboot_hold
from gpuguard.verbs.clock import now
from gpuguard.verbs.holds import hold_again, note_withheld
from gpuguard.verbs.inspect import Planned, look, make_plan, policy_of
from gpuguard.verbs.rebuild import Outcome, left_unready, rebuild, worst_exit_status

_DPKG_STATUS = "/var/lib/dpkg/status"
ACTIONS = {
    Rebuild: "rebuild",
    RefreshInitramfs: "refresh-initramfs",
    Forget: "forget",
    Leave: "leave",
}


@dataclass(slots=True, kw_only=True)
class Automatic:
    """What a run did. ``held_back``: why a reboot is held back now, if it is.

    ``held_again``: packages that had lost a hold of ours. ``problems``: what failed besides
    kernels, one after another.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    unready: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: list[GpuguardError] = field(default_factory=list)
    held_back: str | None = None
    held_again: tuple[str, ...] = ()
    next_release: str | None = None
    reboot_safe: bool | None = None

    @property
    def exit_status(self) -> int:
        """That of the first failure; without one 0, or 1 if a kernel is left not ready."""
        worst = worst_exit_status(self.outcomes, self.unready)
        if worst > os.EX_OK + 1 or not self.problems:
            return worst
        return self.problems[0].exit_status


def run_automatic(
    host: Host, config: Config, progress: Progress, tell: Callable[[Outcome], None]
) -> Automatic:
    """Bring the host where the configuration wants it, and remember what was found.

    The caller holds the lock, package tools have ended, and an interrupted change is cleaned
    up after. One part's failure does not stop the others.

    Args:
        host: where.
        config: what is wanted.
        progress: told about every step of a build.
        tell: told each kernel's outcome at once.
    """
    run, started, seen = Automatic(), now(), _Seen(host)
    _try(run, lambda: host.remove_file(QUEUE_FILE))  # from here on what changes queues anew
    try:
        planned = make_plan(host, config, Request(automatic=True))
        _rebuild(host, config, planned, progress, run, tell)
        run.unready = left_unready(host, config, run.outcomes)
    except GpuguardError as error:
        run.problems.append(error)
    until = seen.until()  # before the holds, which dpkg writes down for us
    if until is None or any(_is_overtaken(outcome) for outcome in run.outcomes):
        # systemd forgets what changes in a folder while the unit runs (path units): ask again
        _try(run, lambda: host.replace_file(QUEUE_FILE, b""))
    _try(run, lambda: _hold_again(host, config, run))
    _try(run, lambda: note_withheld(host))
    _try(run, lambda: _settle_boot_default(host, config))
    _try(run, lambda: _settle_reboot(host, config, run))
    moment = time.time() if until is not None else seen.started
    _try(run, lambda: write_last_run(host, _record(run, started), seen_until=moment))
    return run


def _is_overtaken(outcome: Outcome) -> bool:
    return outcome.error is not None and outcome.error.code == "changed-meanwhile"


def give_up(host: Host, error: GpuguardError) -> None:
    """A run that could not even begin: it is remembered, and not tried again at once.

    The file that queued it goes; else the path unit would start it again and again.
    """
    with suppress(OSError):  # a disk that cannot be written is what the error is about
        host.remove_file(QUEUE_FILE)
        started = now()
        record = LastRun(
            started=started,
            finished=started,
            exit_status=error.exit_status,
            problems=(f"[{error.code}] {error.message}",),
        )
        write_last_run(host, record, seen_until=0)


def _rebuild(
    host: Host,
    config: Config,
    planned: Planned,
    progress: Progress,
    run: Automatic,
    tell: Callable[[Outcome], None],
) -> None:
    if not config.automatic.rebuild:
        return
    builds = [s for s in planned.plan.steps if isinstance(s, Rebuild) and not s.blockers]
    with reboot_hold.while_building(host, config, tuple(step.release for step in builds)):
        for outcome in rebuild(host, config, planned, progress):
            run.outcomes.append(outcome)
            tell(outcome)


def _hold_again(host: Host, config: Config, run: Automatic) -> None:
    run.held_again = hold_again(host, config).held


def _settle_boot_default(host: Host, config: Config) -> None:
    facts = look(host, config, with_p2p=False)
    settle_boot_default(host, config, facts, "automatic")


def _settle_reboot(host: Host, config: Config, run: Automatic) -> None:
    facts = look(host, config, with_p2p=False)
    assessment = assess(facts, policy_of(config))
    run.next_release = facts.next.release
    run.reboot_safe = assessment.reboot.safe
    run.held_back = reboot_hold.settle(host, config, facts, assessment)


def _try(run: Automatic, part: Callable[[], object]) -> None:
    try:
        part()
    except GpuguardError as error:
        run.problems.append(error)
    except OSError as error:
        run.problems.append(unwritable(error))


def _record(run: Automatic, started: str) -> LastRun:
    return LastRun(
        started=started,
        finished=now(),
        exit_status=run.exit_status,
        kernels=tuple(_kernel_run(outcome, run) for outcome in run.outcomes),
        next_release=run.next_release,
        reboot_safe=run.reboot_safe,
        problems=tuple(f"[{error.code}] {error.message}" for error in run.problems),
    )


def _kernel_run(outcome: Outcome, run: Automatic) -> KernelRun:
    release, error = outcome.step.release, outcome.error
    message = error.message if error is not None else "; ".join(run.unready.get(release, ()))
    return KernelRun(
        release=release,
        action=ACTIONS[type(outcome.step)],
        ok=error is None and release not in run.unready,
        code=error.code if error is not None else "",
        message=message,
    )


class _Seen:
    """Whether this run has seen all that dpkg has changed.

    If it has, what is newer in /boot is its own work, and no news to the hooks.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.started = time.time()
        self._dpkg = self._dpkg_state()

    def until(self) -> float | None:
        """Now; None if dpkg was at work meanwhile."""
        return time.time() if self._dpkg == self._dpkg_state() else None

    def _dpkg_state(self) -> tuple[int, int] | None:
        with suppress(OSError):
            status = self._host.path(_DPKG_STATUS).stat()
            return status.st_ino, status.st_mtime_ns
        return None
