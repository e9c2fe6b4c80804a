"""What a lane's P2P requirement means on this host at this moment. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.core.facts import DriverFacts
from gpuguard.proof import Proof
from gpuguard.serving.lane import Lane

_OFF = {"NCCL_P2P_DISABLE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pDecision:
    """``refusal``: why it must not start. ``environment``: what is added to the lane's own."""

    environment: dict[str, str]
    refusal: str | None = None
    note: str | None = None


def decide(
    lane: Lane, proof: Proof | None, running: str | None, driver: DriverFacts
) -> P2pDecision:
    """Look at the requirement, and at what the driver granted since this boot.

    Args:
        lane: who wants to start.
        proof: of this boot; None: there is none, or it could not be read.
        running: release of the running kernel.
        driver: what is loaded now.
    """
    if lane.requires.p2p == "none":
        return P2pDecision(environment=_OFF if lane.engine.gpus == "all" else {})
    problem = proof_problem(lane, proof, running, driver)
    if problem is None:
        return P2pDecision(environment={})
    if lane.requires.p2p == "required":
        return P2pDecision(environment=_OFF, refusal=problem)
    return P2pDecision(
        environment=_OFF, note=f"starts with P2P off (NCCL_P2P_DISABLE=1): {problem}"
    )


def proof_problem(
    lane: Lane, proof: Proof | None, running: str | None, driver: DriverFacts
) -> str | None:
    """Why P2P does not count as granted for what is loaded now; None: it is."""
    if proof is None:
        return "the gate has not seen the driver grant P2P since this boot"
    changed = list(_changes(proof, running, driver))
    if changed:
        return f"what the gate saw at {proof.created} is about another {' and '.join(changed)}"
    if len(proof.cards) < lane.cards_needed:
        return (
            f"P2P was granted between {len(proof.cards)} cards, "
            f"the lane spreads over {lane.cards_needed}"
        )
    return None


def _changes(proof: Proof, running: str | None, driver: DriverFacts) -> Iterator[str]:
    if proof.kernel != running:
        yield "kernel"
    if proof.driver != driver.loaded:
        yield "driver"
    elif proof.build_id != driver.loaded_build_id:
        yield "build of the module"


def fingerprint(
    proof: Proof | None, running: str | None, driver: DriverFacts, cards: tuple[str, ...]
) -> dict[str, object]:
    """What vLLM's P2P cache depends on, and does not look at."""
    return {
        "kernel": running,
        "driver": driver.loaded,
        "build_id": driver.loaded_build_id,
        "cards": sorted(proof.cards) if proof is not None else sorted(cards),
    }
