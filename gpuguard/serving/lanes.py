"""The use cases: switch, roll back, go on after a crash or a boot, and look."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from gpuguard.errors import ConfigError, PreflightError, StateError
from gpuguard.host import Host
from gpuguard.proof import boot_id
from gpuguard.serving import store
from gpuguard.serving.engine import Engine
from gpuguard.serving.front import Front, FrontError, quietly
from gpuguard.serving.front_config import Route
from gpuguard.serving.history import expected_seconds
from gpuguard.serving.install import install_release
from gpuguard.serving.lane import DEFAULT_PORT, Lane
from gpuguard.serving.lane_file import read_lane
from gpuguard.serving.lint import errors_of
from gpuguard.serving.machine import Switch, recover
from gpuguard.serving.preflight import Refusal
from gpuguard.serving.render import render
from gpuguard.serving.sight import check_lane
from gpuguard.serving.steps import Settings, Steps
from gpuguard.serving.store import Release
from gpuguard.serving.switching import Result, new_switch, run
from gpuguard.serving.systemd import Systemd

_OK = 200


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told: of each step, and of what happens within one."""

    step: Callable[[Switch, float | None], None]
    progress: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Intent:
    """What a switch would do. ``switch`` None: the lane serves already."""

    switch: Switch | None
    release: Release
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    first: bool = False
    #: not kept yet: what the preflight refuses never is
    pending: tuple[Release, ...] = ()


class Lanes:
    """The lanes of a host.

    Args:
        host: where.
        program: tells how units call gpuguard; the first word is absolute.
        settings: of the configuration.
        listener: who is told.
    """

    def __init__(
        self,
        host: Host,
        program: Callable[[], tuple[str, ...]],
        settings: Settings,
        listener: Listener,
    ) -> None:
        self._host = host
        self._program = program
        self._settings = settings
        self._listener = listener

    # --- what would be done

    def intend_switch(self, name: str) -> Intent:
        """What ``switch NAME`` does; writes nothing.

        Raises:
            ConfigError: there is no such lane, or its file is wrong.
            StateError, ProbeError: what is recorded cannot be read or written.
        """
        lane = read_lane(self._host, name)
        release = Release(lane, render(lane, self._program()))
        return self._intend("switch", release)

    def intend_rollback(self) -> Intent:
        """What ``rollback`` does.

        Raises:
            PreflightError: there is nothing to go back to.
            StateError, ProbeError: what is recorded cannot be read.
        """
        target = store.read_active(self._host).rollback_target
        if target is None:
            raise PreflightError(
                "there is no lane to go back to: no other one was ever active here",
                code="lane-no-previous",
                hint="gpuguard lane switch NAME",
            )
        return self._intend("rollback", store.read_release(self._host, target))

    def _intend(self, kind: str, release: Release) -> Intent:
        lane_id, active = release.release_id, store.read_active(self._host).lane_id
        first = not store.is_warm(self._host, lane_id)
        seconds = self._expected(lane_id, first=first)
        if active == lane_id and Systemd(self._host).show(release.lane.unit).is_running:
            return Intent(None, release, seconds=seconds, first=first)
        chain, fresh, note = self._chain(release.lane)
        switch = new_switch(self._host, kind, lane_id, active, chain, note)
        pending = (release, *fresh)
        return Intent(switch, release, seconds=seconds, first=first, pending=pending)

    def _chain(self, lane: Lane) -> tuple[tuple[str, ...], list[Release], str]:
        """Fallbacks: what was promoted last, else what the file says now; that is not kept yet."""
        chain: list[str] = []
        fresh: list[Release] = []
        missing: list[str] = []
        for name in lane.fallback:
            known = store.find_release(self._host, name)
            if known is None:
                try:
                    fresh.append(self._release_of_file(name))
                except ConfigError as error:
                    missing.append(f"{name} ({error.message})")
                    continue
                known = fresh[-1].release_id
            chain.append(known)
        note = f"no fallback: {', '.join(missing)}" if missing else ""
        return tuple(chain), fresh, note

    def _release_of_file(self, name: str) -> Release:
        lane = read_lane(self._host, name)
        if errors := errors_of(check_lane(self._host, lane, store.read_history(self._host))):
            raise ConfigError(errors[0].message, code="lane-invalid")
        return Release(lane, render(lane, self._program()))

    def look(self, intent: Intent) -> Intent:
        """The intent with everything that is in its way."""
        if (first := _under_way(self._host)) is not None:
            return replace(intent, refusals=(first,))  # the rest is not what will be met
        if intent.switch is None:
            return intent
        steps = self._steps(intent.pending)
        refused = steps.look(intent.switch)
        return replace(intent, refusals=refused, notes=(*intent.switch.notes, *steps.notes))

    # --- do it

    def carry_out(self, intent: Intent) -> tuple[Result, Steps]:
        """Make the switch of an intent that has one."""
        assert intent.switch is not None  # noqa: S101 - the caller has looked
        return self._run(intent.switch, intent.pending)

    def _steps(self, pending: tuple[Release, ...] = ()) -> Steps:
        return Steps(self._host, self._settings, self._listener.progress, pending)

    def _run(self, switch: Switch, pending: tuple[Release, ...] = ()) -> tuple[Result, Steps]:
        steps = self._steps(pending)
        return run(self._host, switch, steps, self._say), steps

    def _say(self, switch: Switch) -> None:
        first = not store.is_warm(self._host, switch.target)
        self._listener.step(switch, self._expected(switch.target, first=first))

    def _expected(self, lane_id: str, *, first: bool) -> float | None:
        return expected_seconds(store.read_history(self._host), lane_id, first=first)

    def finish_interrupted(self) -> tuple[Result, Steps] | None:
        """Bring an interrupted switch to its end; None: there is none.

        Raises:
            StateError, ProbeError: what is recorded cannot be read.
        """
        switch = store.read_switch(self._host)
        if switch is None:
            return None
        here = boot_id(self._host)
        after = recover(switch, same_boot=switch.boot_id == here)
        return self._run(replace(after, boot_id=here))

    def start_active(self) -> tuple[Lane | None, bool]:
        """Start the lane that should serve (None: none should), and whether it had to be.

        Raises:
            StateError, ProbeError: what is recorded cannot be read.
            CommandError: systemd refuses.
        """
        active = store.read_active(self._host).lane_id
        if active is None:
            return None, False
        release = store.read_release(self._host, active)
        systemd = Systemd(self._host)
        state = systemd.show(release.lane.unit)
        if install_release(self._host, release) or state.needs_reload:
            systemd.reload()
        if state.is_stopped:
            systemd.start(release.lane.unit)
        return release.lane, state.is_stopped

    def drain(self) -> tuple[Lane | None, tuple[str, ...]]:
        """Answer new requests with 503 and wait for those under way; the lane goes on running.

        ``resume``, or a switch, sends traffic to it again; so does the next boot.

        Returns:
            The active lane, and notes: what may be cut off when the host goes down now.

        Raises:
            StateError, ProbeError: what is recorded cannot be read.
            FrontError: the proxy does not obey.
        """
        release = active_release(self._host)
        front = Front(self._host, self._settings.retry_after)
        steps = self._steps()
        if front.is_installed():
            port = DEFAULT_PORT if release is None else release.lane.port
            front.set_route(Route(port, is_open=False))
        elif release is not None:
            steps.notes.append("there is no front: clients can still ask the lane's own port")
        if release is not None:
            steps.wait_idle(release.lane)
        return None if release is None else release.lane, tuple(steps.notes)

    def give_traffic(self, lane: Lane) -> None:
        """Send traffic to the active lane, which runs, and see that it answers.

        Raises:
            FrontError: the proxy does not obey.
            PreflightError: the lane runs, and does not answer.
        """
        if (problem := self.reopen_front()) is not None:
            raise FrontError(f"{lane.lane_id} gets no traffic: {problem}")
        answer = Engine(lane.port).get("/health")
        if answer.status != _OK:
            said = answer.text if answer.status == 0 else f"HTTP {answer.status}"
            raise PreflightError(
                f"{lane.lane_id} runs already, and does not answer: {said.strip()[:100]}",
                code="lane-down",
                hint=f"it may still be starting: journalctl -u {lane.unit}; "
                f"else: systemctl restart {lane.unit}, or gpuguard lane rollback",
            )

    def reopen_front(self) -> str | None:
        """Send traffic to the active lane if the proxy does not; why that cannot be done."""
        release = active_release(self._host)
        front = Front(self._host, self._settings.retry_after)
        if release is None or not front.is_installed():
            return None
        route = Route(release.lane.port, is_open=True)
        return quietly(lambda: front.set_route(route))


def _under_way(host: Host) -> Refusal | None:
    """Another switch that comes before any new one."""
    is_locked, switch = store.is_switching(host), store.read_switch(host)
    if is_locked:
        return Refusal("lane-busy", store.BUSY, store.BUSY_REMEDY)
    if switch is None:
        return None
    how = "was interrupted" if is_locked is False else "is under way, or was interrupted,"
    return Refusal(
        "lane-switch-interrupted",
        f"the switch to {switch.new} {how} in {switch.step}; it is brought to its end first",
        "gpuguard lane resume brings it to its end",
    )


def is_edited(host: Host, lane: Lane) -> bool | None:
    """Whether the file of a lane says something else than what was started from it.

    None: the file is gone, or is none any more.
    """
    try:
        return read_lane(host, lane.name).sha256 != lane.sha256
    except ConfigError:
        return None


def active_release(host: Host) -> Release | None:
    """The release that should serve; None: none, or its record is gone."""
    active = store.read_active(host).lane_id
    with suppress(StateError):
        return None if active is None else store.read_release(host, active)
    return None
