"""The lanes that serve, as series."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.core.metrics import Sample, sample, stateset
from gpuguard.core.samples_changes import timestamp

#: In the order of their numbers, from 1 on; 0 is no switch.
STEPS = (
    "preflight", "snapshot", "drain", "stop", "start", "ready", "identity", "gate", "promote",
    "undrain", "halt", "done",
)  # fmt: skip
OUTCOMES = ("promoted", "refused", "rolled-back", "fell-back", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFacts:
    """What the records say of the lanes, and the engine of itself; times are RFC 3339.

    ``active``: its lane id; None: none is. ``was_active``: one was, ever. ``step``, ``started``: of
    the switch that is recorded. ``switches``: outcome and end of those that are over, oldest first.
    ``ready``: the engine answers; None: there is no front, so nobody can say where. ``p2p_wanted``
    and ``p2p_on`` are of the active lane; None: not known.
    """

    active: str | None = None
    was_active: bool = False
    step: str | None = None
    started: str | None = None
    switches: tuple[tuple[str, str], ...] = ()
    ready: bool | None = None
    p2p_wanted: bool | None = None
    p2p_on: bool | None = None


def lane_samples(facts: LaneFacts) -> Iterator[Sample]:
    """Which lane serves, the switch under way, and how those before it ended."""
    if facts.active is not None:
        yield sample("gpuguard_lane_info", 1, facts.active.rpartition("-")[0], facts.active)
    if facts.was_active:
        yield sample("gpuguard_lane_active", facts.active is not None)
    if facts.ready is not None:
        yield sample("gpuguard_lane_ready", facts.ready)
    for name, value in (("wanted", facts.p2p_wanted), ("on", facts.p2p_on)):
        if value is not None:
            yield sample(f"gpuguard_lane_p2p_{name}", value)
    yield from _switch_samples(facts)
    ended = [(outcome, when) for outcome, when in facts.switches if outcome in OUTCOMES]
    outcome, when = ended[-1] if ended else (None, None)
    yield from stateset("gpuguard_lane_last_switch_outcome", OUTCOMES, outcome)
    last = 0.0 if when is None else timestamp(when)
    yield sample("gpuguard_lane_last_switch_timestamp_seconds", last)
    for one in OUTCOMES:
        number = sum(outcome == one for outcome, _ in ended)
        yield sample("gpuguard_lane_switches_total", number, one)


def _switch_samples(facts: LaneFacts) -> Iterator[Sample]:
    yield sample("gpuguard_lane_switching", facts.step is not None)
    number = 0 if facts.step is None else STEPS.index(facts.step) + 1
    yield sample("gpuguard_lane_switch_step", number)
    if facts.started is not None:
        yield sample("gpuguard_lane_switch_started_timestamp_seconds", timestamp(facts.started))
