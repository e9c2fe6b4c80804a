"""The switch from one lane to another as a state machine. No I/O: what comes next, and why.

``advance`` and ``recover`` take a record and return the next one; ``switching`` writes it down,
then does what it says. Every lane is tried at most once and recoveries are counted, so that
it comes to an end whatever happens.

    preflight → snapshot → drain → stop → start → ready → identity → gate → promote → done
        │           │        │       └────────┬───────────────────────┘
        └─ refused ─┘      undrain            └→ the lane before, then the fallbacks → halt
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Step(StrEnum):
    """What is done next; written down before it is begun."""

    PREFLIGHT = "preflight"
    SNAPSHOT = "snapshot"
    DRAIN = "drain"
    STOP = "stop"
    START = "start"
    READY = "ready"
    IDENTITY = "identity"
    GATE = "gate"
    PROMOTE = "promote"
    UNDRAIN = "undrain"  # give traffic back to the lane that was not stopped
    HALT = "halt"  # nothing can serve: stop everything, say so
    DONE = "done"


class Role(StrEnum):
    """Why the target is being started."""

    NEW = "new"
    BACK = "back"
    FALLBACK = "fallback"


class Outcome(StrEnum):
    """How it ended."""

    PROMOTED = "promoted"
    REFUSED = "refused"  # nothing was stopped
    ROLLED_BACK = "rolled-back"
    FELL_BACK = "fell-back"
    FAILED = "failed"  # nothing serves


_ORDER = (
    Step.PREFLIGHT,
    Step.SNAPSHOT,
    Step.DRAIN,
    Step.STOP,
    Step.START,
    Step.READY,
    Step.IDENTITY,
    Step.GATE,
    Step.PROMOTE,
)
_HARMLESS = frozenset({Step.PREFLIGHT, Step.SNAPSHOT})
#: The lane before still runs, or nothing did.
NOTHING_STOPPED = _HARMLESS | {Step.DRAIN, Step.UNDRAIN}
_WON = {
    Role.NEW: Outcome.PROMOTED,
    Role.BACK: Outcome.ROLLED_BACK,
    Role.FALLBACK: Outcome.FELL_BACK,
}
#: The lane before, or another that was good, serves at the end of these.
LED_BACK = frozenset({Outcome.REFUSED, Outcome.ROLLED_BACK, Outcome.FELL_BACK})
_MAX_RECOVERIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One switch under way; lanes by lane id.

    ``old``: the lane that serves now. ``chain``: fallbacks of the new one, in order.
    ``reasons``: why each lane that was tried is not the one that serves.
    """

    switch_id: str
    kind: str  # "switch", "rollback", "boot"
    started: str
    boot_id: str
    new: str
    old: str | None
    chain: tuple[str, ...] = ()
    step: Step = Step.PREFLIGHT
    role: Role = Role.NEW
    target: str = ""
    tried: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    recoveries: int = 0
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        """The first target is the new lane."""
        if not self.target:
            object.__setattr__(self, "target", self.new)

    @property
    def lanes(self) -> tuple[str, ...]:
        """Every lane that this switch may have started."""
        named = (self.old, self.new, *self.chain)
        return tuple(dict.fromkeys(lane for lane in named if lane is not None))


def advance(switch: Switch, failure: str | None = None) -> Switch:
    """The next state after the step was done, or failed with a reason."""
    step = switch.step
    if failure is not None:
        return _failed(switch, failure)
    if step is Step.PROMOTE:
        return replace(switch, step=Step.DONE, outcome=_WON[switch.role])
    if step is Step.UNDRAIN:
        return replace(switch, step=Step.DONE, outcome=Outcome.REFUSED)
    if step is Step.HALT:
        return replace(switch, step=Step.DONE, outcome=Outcome.FAILED)
    return replace(switch, step=_ORDER[_ORDER.index(step) + 1])


def _failed(switch: Switch, failure: str) -> Switch:
    known = replace(switch, reasons=(*switch.reasons, f"{switch.target}: {failure}"))
    if switch.step in _HARMLESS:
        return replace(known, step=Step.DONE, outcome=Outcome.REFUSED)
    if switch.step is Step.DRAIN:
        return replace(known, step=Step.UNDRAIN)
    if switch.step is Step.UNDRAIN:  # nothing was stopped; who routes traffic says why he cannot
        return replace(known, step=Step.DONE, outcome=Outcome.REFUSED)
    if switch.step is Step.HALT:
        return replace(known, step=Step.DONE, outcome=Outcome.FAILED)
    if switch.step is Step.STOP:  # the cards are not free: every other lane would meet the same
        return replace(known, step=Step.HALT)
    return _next_candidate(known)


def _next_candidate(switch: Switch) -> Switch:
    tried = (*switch.tried, switch.target)
    for lane in (switch.old, *switch.chain):
        if lane is not None and lane not in tried:
            role = Role.BACK if lane == switch.old else Role.FALLBACK
            return replace(switch, tried=tried, target=lane, role=role, step=Step.STOP)
    return replace(switch, tried=tried, step=Step.HALT)


def recover(switch: Switch, *, same_boot: bool) -> Switch:
    """Where to go on after the process that made the switch has died.

    In the same boot a step is repeated, each can be; but the second time, or after a reboot that
    came while a new lane was starting, that lane is given up: it may be the reason.
    """
    counted = replace(switch, recoveries=switch.recoveries + 1)
    step = switch.step
    if step in _HARMLESS or step is Step.DRAIN:
        return _failed(counted, f"interrupted in {step}, before anything was stopped")
    if step in (Step.PROMOTE, Step.UNDRAIN, Step.HALT, Step.DONE):
        return counted  # decided already, and doing it twice is doing it once
    if counted.recoveries > _MAX_RECOVERIES:
        known = (*switch.reasons, f"{switch.target}: interrupted {counted.recoveries} times")
        return replace(counted, reasons=known, step=Step.HALT)
    if same_boot and (switch.recoveries == 0 or switch.role is not Role.NEW):
        return counted
    if switch.role is Role.NEW:
        how = "interrupted again" if same_boot else "the machine restarted"
        known = (*switch.reasons, f"{switch.target}: {how} in {step}")
        return _next_candidate(replace(counted, reasons=known))
    return replace(counted, step=Step.STOP)


def unwritten(switch: Switch, problem: str) -> Switch:
    """Where to go on when a step cannot be written down, and so is not begun."""
    if switch.step is Step.STOP and switch.role is Role.NEW:  # the lane before still runs
        known = (*switch.reasons, f"{switch.target}: {problem}")
        return replace(switch, reasons=known, step=Step.UNDRAIN)
    return _failed(switch, problem)


def interrupt(switch: Switch) -> Switch:
    """Somebody asked to stop (Ctrl-C, SIGTERM): back to what served before."""
    if switch.step in (Step.PROMOTE, Step.UNDRAIN, Step.HALT, Step.DONE):
        return switch
    if switch.step is Step.STOP:  # it can be begun again; what runs is stopped either way
        known = (*switch.reasons, f"{switch.target}: interrupted in {switch.step}")
        return _next_candidate(replace(switch, reasons=known))
    return _failed(switch, f"interrupted in {switch.step}")
