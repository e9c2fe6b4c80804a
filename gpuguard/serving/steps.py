"""What each step of a switch does to the host. Every one can be done again after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from gpuguard.errors import CommandError, GpuguardError, StateError
from gpuguard.host import Host
from gpuguard.proof import boot_id
from gpuguard.serving import store
from gpuguard.serving.caches import prune_caches
from gpuguard.serving.engine import Engine
from gpuguard.serving.front import Front, FrontError, FrontUnknownError, quietly
from gpuguard.serving.front_config import Route
from gpuguard.serving.install import install_release, installed_text
from gpuguard.serving.keeping import keep_images, lanes_to_keep
from gpuguard.serving.lane import Lane, unit_of
from gpuguard.serving.machine import Role, Step, Switch
from gpuguard.serving.memory import remember_baseline, wait_until_free
from gpuguard.serving.preflight import Refusal, refusals
from gpuguard.serving.proving import NOBODY, Prover, foresee, make_sure
from gpuguard.serving.readiness import identity_notes, identity_problem
from gpuguard.serving.reading import parse_load, pool_tokens
from gpuguard.serving.sight import (
    check_lane,
    disk_problem,
    look_before,
    p2p_of,
    port_problem,
    proof_of,
)
from gpuguard.serving.smoke import PASS, run_smoke
from gpuguard.serving.store import Release
from gpuguard.serving.strangers import stranger_problem
from gpuguard.serving.systemd import Systemd
from gpuguard.serving.watch import Watch

_OK = 200
_POLL_SECONDS = 0.5
_STOP_GRACE = 60.0  # beyond the unit's own limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is the same for all lanes of a host."""

    retry_after: int = 30
    prover: Prover = field(default=NOBODY)


class Steps:
    """Acts. What was noticed on the way stays in ``notes``, ``starts``, ``gate`` and so on."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        progress: Callable[[str], None],
        pending: tuple[Release, ...] = (),
    ) -> None:
        self._host = host
        self._pending = {release.release_id: release for release in pending}
        self._progress = progress
        self._prover = settings.prover
        self._systemd = Systemd(host)
        self._watch = Watch(host, self._systemd, progress)
        self._front = Front(host, settings.retry_after)
        self.notes: list[str] = []
        self.refusals: tuple[Refusal, ...] = ()
        self.front_problem: str | None = None
        self.starts: list[dict[str, Any]] = []
        self.kv_tokens: int | None = None
        self.gate: dict[str, Any] | None = None

    def do(self, switch: Switch) -> str | None:
        """Do the step that a switch is at; why it failed, or None.

        Raises:
            GpuguardError, OSError: also a failure of the step.
        """
        action = {
            Step.PREFLIGHT: self._preflight,
            Step.SNAPSHOT: self._snapshot,
            Step.DRAIN: self._drain,
            Step.STOP: self._stop,
            Step.START: self._start,
            Step.READY: self._ready,
            Step.IDENTITY: self._identity,
            Step.GATE: self._gate,
            Step.PROMOTE: self._promote,
            Step.UNDRAIN: self._undrain,
            Step.HALT: self._halt,
        }[switch.step]
        return action(switch)

    def host_goes_down(self) -> bool:
        """Whether systemd starts nothing any more, so that no other lane can be tried."""
        return self._systemd.is_going_down()

    # --- before anything is stopped

    def _preflight(self, switch: Switch) -> str | None:
        self.refusals = self.look(switch)
        if not self.refusals:  # what was refused is not kept: nobody is to fall back on it
            for lane_id, release in self._pending.items():
                # who asks for a lane by name gets the files that this gpuguard makes of it
                anew = switch.kind == "switch" and lane_id == switch.new
                store.write_release(self._host, release, anew=anew)
            self._pending.clear()
        return "; ".join(refusal.message for refusal in self.refusals) or None

    def look(self, switch: Switch) -> tuple[Refusal, ...]:
        """Everything that keeps the target from being started; changes nothing."""
        lane = self._release(switch.target).lane
        try:
            self._systemd.show(lane.unit)
        except CommandError as error:  # what runs, and on which port, cannot be told either
            said = (error.detail or error.message).strip().splitlines()[-1]
            remedy = "see why: systemctl is-system-running"
            return (Refusal("lane-systemd-silent", f"systemd does not answer: {said}", remedy),)
        # what was good once is not measured against newer rules when it must come back
        asked_for = switch.kind == "switch" and switch.role is Role.NEW
        is_new = asked_for or not store.was_promoted(self._host, switch.target)
        problems = check_lane(self._host, lane, store.read_history(self._host)) if is_new else ()
        front = self._front_problem()
        if not asked_for and front is not None:
            self._note(front)
            front = None
        facts = look_before(
            self._host,
            lane,
            problems,
            own_ports=self._own_ports(switch),
            front=front,
            progress=self._progress,
        )
        if facts.disk is not None and not asked_for:  # a record less, but a lane that serves
            self._note(facts.disk)
            facts = replace(facts, disk=None)
        facts = replace(facts, p2p=foresee(self._host, lane, self._prover))
        if facts.p2p.note is not None:
            self._note(f"{lane.lane_id}: {facts.p2p.note}")
        if lane.engine.gpus == "all" and switch.role is Role.NEW:  # later it is the stop that looks
            ours = {*self._names(), *(one.rpartition("-")[0] for one in switch.lanes)}
            problem, note = stranger_problem(self._host, frozenset(ours))
            facts = replace(facts, strangers=problem)
            self._note(*([] if note is None else [note]))
        return refusals(facts)

    def _own_ports(self, switch: Switch) -> frozenset[int]:
        """Ports of lanes that run now and will be stopped first, recorded as active or not."""
        ports = set()
        for lane_id in (*switch.lanes, *store.release_ids(self._host)):
            with suppress(GpuguardError):
                lane = self._release(lane_id).lane
                if not self._systemd.show(lane.unit).is_stopped:
                    ports.add(lane.port)
        return frozenset(ports)

    def _front_problem(self) -> str | None:
        if not self._front.is_installed():
            self._note("there is no front: clients ask the lane's own port (gpuguard lane setup)")
            return None
        try:
            self._front.state()
        except FrontUnknownError:  # a dry run by somebody who may not ask
            raise
        except FrontError as error:
            return error.message
        return None

    def _snapshot(self, switch: Switch) -> str | None:
        if switch.kind == "switch" and (problem := disk_problem(self._host)) is not None:
            return problem
        active = store.read_active(self._host)
        proof = proof_of(self._host)
        old = None if switch.old is None else self._release(switch.old)
        unit = None if old is None else installed_text(self._host, old)
        kept = (*(self._release(one).lane for one in switch.lanes), *lanes_to_keep(self._host))
        document = {
            "switch": switch.switch_id,
            "taken": switch.started,
            "boot_id": boot_id(self._host),
            "active": switch.old,
            "image": None if old is None else old.lane.engine.image,
            "images": [lane.engine.image for lane in kept if lane.engine.image is not None],
            "unit": unit,
            "gate": active.gate,
            "proof": None if proof is None else {"created": proof.created, "driver": proof.driver},
        }
        try:
            store.write_snapshot(self._host, switch.switch_id, document)
        except StateError as error:
            if switch.kind == "switch":
                raise
            self._note(error.message)
        self._note(*keep_images(self._host, kept, drop_others=False))
        return None

    # --- the old lane

    def _drain(self, switch: Switch) -> str | None:
        old = None if switch.old is None else self._release(switch.old).lane
        if self._front.is_installed():
            port = (old or self._release(switch.new).lane).port
            self._close_front(switch, port)
        if old is not None:
            self.wait_idle(old)
        return None

    def _close_front(self, switch: Switch, port: int) -> None:
        try:
            self._front.set_route(Route(port, is_open=False))
        except FrontError as error:
            if switch.kind == "switch":
                raise
            self._front_is_down(error.message)

    def wait_idle(self, lane: Lane) -> None:
        """Let a lane that runs finish its requests, as long as its file says."""
        if not self._systemd.show(lane.unit).is_running:
            return
        deadline = time.monotonic() + lane.timeouts.drain
        engine = Engine(lane.port)
        while (left := deadline - time.monotonic()) > 0:
            answer = engine.get("/metrics")
            if answer.status != _OK:
                self._note(f"{lane.lane_id} does not tell what it is doing; stopped as it is")
                return
            load = parse_load(answer.text)
            if load.is_idle:
                return
            busy = (load.running or 0) + (load.waiting or 0)
            self._progress(f"waits for {busy:.0f} requests, at most {left:.0f} s more")
            time.sleep(min(_POLL_SECONDS, left))
        self._note(f"{lane.lane_id} still had requests after {lane.timeouts.drain:g} s")

    def _stop(self, switch: Switch) -> str | None:
        lanes = [self._release(lane_id).lane for lane_id in switch.lanes]
        seconds = {unit_of(name): _STOP_GRACE for name in self._names()}
        for lane in lanes:  # an edited lane has one unit and two limits: the engine has its own
            limit = lane.timeouts.stop + _STOP_GRACE
            seconds[lane.unit] = max(limit, seconds.get(lane.unit, 0.0))
        for unit, limit in seconds.items():
            state = self._systemd.stop(unit, limit)
            if not state.is_stopped:
                return f"{unit} does not stop: {state.active} ({state.sub})"
        if any(lane.engine.gpus == "all" for lane in lanes):
            limit = max(lane.timeouts.memory for lane in lanes)
            memory = wait_until_free(self._host, limit)
            if memory.problem is not None:
                return f"the cards' memory is not back: {memory.problem}"
            if memory.note is not None:
                self._note(memory.note)
            else:
                remember_baseline(self._host)
        return None

    def _names(self) -> set[str]:
        return {one.rpartition("-")[0] for one in store.release_ids(self._host)}

    # --- the next lane

    def _start(self, switch: Switch) -> str | None:
        release = self._release(switch.target)
        lane = release.lane
        if switch.role is not Role.NEW and (found := self.look(switch)):
            return "; ".join(refusal.message for refusal in found)
        state = self._systemd.show(lane.unit)
        if state.is_stopped and (problem := port_problem(lane.port)) is not None:
            return problem
        if state.is_stopped and (unproven := self._prove(lane)) is not None:
            return unproven
        if install_release(self._host, release) or state.needs_reload:
            self._systemd.reload()
        if state.is_stopped:  # else it runs already: this is the second time after a crash
            self._systemd.start(lane.unit)
        return None

    def _prove(self, lane: Lane) -> str | None:
        """The old lane has stopped: now bytes can show what the new one wants to know."""
        before = p2p_of(self._host, lane)
        decision = make_sure(self._host, lane, self._prover, self._progress, again=True)
        if decision.note is not None:
            self._note(f"{lane.lane_id}: {decision.note}")
        elif before.gap is not None and decision.gap is None:
            self._note("P2P was proven by bytes over every pair of cards, and by an all-reduce")
        return None if decision.refusal is None else f"requires P2P: {decision.refusal}"

    def _ready(self, switch: Switch) -> str | None:
        lane = self._release(switch.target).lane
        first = not store.is_warm(self._host, lane.lane_id)
        begun = time.monotonic()
        failure = self._watch.until_ready(lane, lane.start_seconds(first=first))
        if failure is None:
            seconds = round(time.monotonic() - begun, 1)
            self.starts.append({"lane": lane.lane_id, "first": first, "seconds": seconds})
            store.mark_warm(self._host, lane.lane_id)
        return failure

    def _identity(self, switch: Switch) -> str | None:
        release = self._release(switch.target)
        seen = self._watch.evidence(release)
        self._note(*identity_notes(release.lane, seen))
        self.kv_tokens = pool_tokens(seen.metrics, seen.lines or ())
        return identity_problem(release.lane, seen)

    def _gate(self, switch: Switch) -> str | None:
        lane = self._release(switch.target).lane
        result = run_smoke(lane, Engine(lane.port))
        self.gate = result.document()
        return None if result.verdict == PASS else f"gate {result.verdict}: {result.why}"

    def _promote(self, switch: Switch) -> str | None:
        lane = self._release(switch.target).lane
        store.mark_promoted(self._host, switch.target, switch.started)
        before = store.read_active(self._host)
        if before.lane_id != switch.target:
            last = before.last_good
            previous = last if last not in (None, switch.target) else before.previous
            active = store.Active(
                lane_id=switch.target,
                last_good=switch.target,
                previous=previous,
                since=switch.started,
                gate=self.gate,
            )
            store.write_active(self._host, active)
            before = active
        self._open_front(lane)
        try:
            self._tidy(switch, before)
        except (GpuguardError, OSError) as error:  # no reason to take a lane down that is good
            self._note(f"not everything that is no longer needed could be removed: {error}")
        return None

    def _tidy(self, switch: Switch, active: store.Active) -> None:
        lanes = lanes_to_keep(self._host)
        self._note(*keep_images(self._host, lanes, drop_others=True))
        keep = {*switch.lanes, active.previous, active.last_good, switch.switch_id}
        keep |= {lane.lane_id for lane in lanes}
        kept = frozenset(name for name in keep if name is not None)
        store.prune(self._host, kept)
        self._note(*prune_caches(self._host, kept))

    def _open_front(self, lane: Lane) -> None:
        if self._front.is_installed():
            route = Route(lane.port, is_open=True)
            problem = quietly(lambda: self._front.set_route(route))
            if problem is not None:
                self._front_is_down(problem)

    # --- the ways out

    def _undrain(self, switch: Switch) -> str | None:
        if switch.old is not None:
            self._open_front(self._release(switch.old).lane)
        return None

    def _halt(self, switch: Switch) -> str | None:
        before = store.read_active(self._host)
        if before.lane_id is not None:
            last = before.last_good or before.lane_id
            store.write_active(self._host, store.Active(last_good=last, previous=before.previous))
        if self._front.is_installed():
            port = self._release(switch.target).lane.port
            problem = quietly(lambda: self._front.set_route(Route(port, is_open=False)))
            if problem is not None:
                self._front_is_down(problem)
        failures = []
        for lane_id in switch.lanes:
            lane = self._release(lane_id).lane
            state = self._systemd.stop(lane.unit, lane.timeouts.stop + _STOP_GRACE)
            if not state.is_stopped:
                failures.append(f"{lane.unit} does not stop")
        return "; ".join(failures) or None

    # --- small things

    def _release(self, lane_id: str) -> Release:
        if lane_id in self._pending:
            return self._pending[lane_id]
        return store.read_release(self._host, lane_id)

    def _note(self, *texts: str) -> None:
        self.notes += [text for text in texts if text not in self.notes]

    def _front_is_down(self, problem: str) -> None:
        self.front_problem = problem
        self._note(problem)
