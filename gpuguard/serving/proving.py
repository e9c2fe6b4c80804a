"""Prove P2P by bytes before a lane that wants it is started.

Bytes are moved by what is above this layer (``gpuguard verify --deep``), which is handed in as a
``Prover``. It needs cards that nobody uses: so this is done after the old lane has stopped, and
after a boot; never beside a lane that serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpuguard.host import Host
from gpuguard.serving.lane import Lane
from gpuguard.serving.memory import wait_until_free
from gpuguard.serving.p2p_policy import P2pDecision, unproven
from gpuguard.serving.sight import p2p_of

_INSTALL = (
    "install what is missing (pip install 'gpuguard[deep]'; with a driver before 580: "
    "'gpuguard[deep-cu12]'); requires: {proof: grant} takes the driver's word"
)


@dataclass(frozen=True, slots=True)
class Prover:
    """Who moves bytes.

    ``missing``: what is not installed for it. ``prove``: do it within so many seconds, tell the
    steps; why that proves nothing, or None, and then it is recorded.
    """

    missing: Callable[[], str | None]
    prove: Callable[[float, Callable[[str], None]], str | None]


NOBODY = Prover(lambda: "nobody here can move bytes", lambda _seconds, _progress: "nobody did")


def foresee(host: Host, lane: Lane, prover: Prover) -> P2pDecision:
    """What the P2P requirement will mean once the cards are free; touches none of them."""
    decision = p2p_of(host, lane)
    if decision.gap is None or not decision.gap.is_provable:
        return decision
    if (missing := prover.missing()) is not None:
        return _failed(lane, decision, f"cannot be made up for here: {missing}", _INSTALL)
    note = (
        "P2P will be proven by bytes once the cards are free, before the lane is started "
        f"(at most {lane.timeouts.prove:g} s): {decision.gap.problem}"
    )
    return replace(decision, refusal=None, note=note)


def make_sure(
    host: Host,
    lane: Lane,
    prover: Prover,
    progress: Callable[[str], None],
    *,
    again: bool,
) -> P2pDecision:
    """What the P2P requirement means for a start now; moves bytes where only they are missing.

    Args:
        host: where.
        lane: who is about to start.
        prover: who moves bytes.
        progress: told what takes long.
        again: also where somebody tried since this boot, and could not tell.
    """
    decision = p2p_of(host, lane)
    gap = decision.gap
    if gap is None or not gap.is_provable or (gap.was_tried and not again):
        return decision
    if (missing := prover.missing()) is not None:
        return _failed(lane, decision, f"cannot be made up for here: {missing}", _INSTALL)
    if (busy := _busy(host, lane)) is not None:
        free = "free the cards (nvidia-smi names who is on them)"
        return _failed(lane, decision, f"none can be moved now: {busy}", free)
    progress(f"moves bytes between the cards, at most {lane.timeouts.prove:g} s")
    problem = prover.prove(lane.timeouts.prove, lambda step: progress(f"moves bytes: {step}"))
    after = p2p_of(host, lane)
    if problem is None or after.gap is None or problem in after.gap.problem:
        return after
    return _failed(lane, after, problem, after.gap.remedy)


def _busy(host: Host, lane: Lane) -> str | None:
    """Why the cards are not for us alone; what was just stopped may still hold memory."""
    memory = wait_until_free(host, min(lane.timeouts.memory, lane.timeouts.prove))
    return memory.problem or memory.note


def _failed(lane: Lane, decision: P2pDecision, why: str, remedy: str) -> P2pDecision:
    assert decision.gap is not None  # noqa: S101 - the callers have looked
    gap = replace(decision.gap, problem=f"{decision.gap.problem}; {why}", remedy=remedy)
    return unproven(lane, gap, decision.tier)
