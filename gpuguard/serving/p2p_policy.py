"""What a lane's P2P requirement means on this host at this moment. No I/O.

Two tiers are recorded since the boot: what the driver grants (the gate), and what bytes have shown
(``verify --deep``). A lane says which of them it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from gpuguard.core.facts import DriverFacts
from gpuguard.proof import DeepProof, Proof
from gpuguard.serving.lane import Lane

_OFF = {"NCCL_P2P_DISABLE": "1"}
_BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # else CUDA counts the fastest card first
#: Whether and where NCCL tells how it connects the cards: gpuguard's, unless a lane sets one.
LOG_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
_TELLING = ("INFO", "TRACE")
_SUBSYSTEMS = frozenset({"ALL", "INIT", "P2P"})
_ASK_THE_GATE = "systemctl restart gpuguard-verify.service, then gpuguard doctor if it fails"
_MOVE_BYTES = "with free cards: gpuguard verify --deep (every start of the lane tries it, too)"
_MEND = (
    "gpuguard doctor tells causes; once it is mended, with free cards: gpuguard verify --deep. "
    "Until then requires: {p2p: preferred} starts without P2P"
)


class Tier(StrEnum):
    """What is shown of P2P since this boot."""

    NONE = "none"
    GRANT = "grant"  # the driver's word
    BYTES = "bytes"  # data arrives over every pair, and through an all-reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class Proofs:
    """What is recorded since this boot; None: nothing. ``…_problem``: it cannot be believed."""

    grant: Proof | None = None
    deep: DeepProof | None = None
    grant_problem: str | None = None
    deep_problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Why P2P does not count as proven.

    ``is_provable``: nothing but bytes is missing, and nothing speaks against moving some.
    ``was_tried``: somebody did since this boot, and could not tell.
    """

    problem: str
    remedy: str
    is_provable: bool = False
    was_tried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pDecision:
    """``refusal``: why it must not start. ``environment``: what is added to the lane's own.

    ``gap``: what is missing from the proof that the lane wants; None: nothing, or it wants none.
    """

    environment: dict[str, str] = field(default_factory=dict)
    tier: Tier = Tier.NONE
    gap: Gap | None = None
    refusal: str | None = None
    note: str | None = None


def crosses_cards(lane: Lane) -> bool:
    """It wants P2P, and lies on several cards, in whatever way: NCCL has to connect them."""
    return lane.wants_p2p and lane.cards_needed > 1


def tells_transport(lane: Lane) -> bool:
    """The lane's own environment does not keep NCCL's lines about it out of the journal."""
    given = {name: lane.env[name] for name in LOG_VARIABLES if name in lane.env}
    if not given:
        return True
    subsystems = set(given.get("NCCL_DEBUG_SUBSYS", "INIT").upper().split(","))
    is_told = given.get("NCCL_DEBUG", "").upper() in _TELLING and bool(subsystems & _SUBSYSTEMS)
    return is_told and "NCCL_DEBUG_FILE" not in given


def decide(lane: Lane, proofs: Proofs, running: str | None, driver: DriverFacts) -> P2pDecision:
    """Look at the requirement, and at what was shown since this boot.

    Args:
        lane: who wants to start.
        proofs: of this boot.
        running: release of the running kernel.
        driver: what is loaded now.
    """
    grant = grant_gap(lane, proofs, running, driver)
    shown = bytes_gap(proofs, running, driver)
    tier = Tier.NONE if grant else Tier.GRANT if shown else Tier.BYTES
    if lane.requires.p2p == "none":
        return P2pDecision(environment=_OFF if lane.engine.gpus == "all" else {}, tier=tier)
    gap = grant or (shown if lane.requires.proof == "bytes" else None)
    if gap is None:
        return P2pDecision(tier=tier, environment=_order(lane, proofs))
    return unproven(lane, gap, tier)


def unproven(lane: Lane, gap: Gap, tier: Tier) -> P2pDecision:
    """What is done where the proof that a lane wants is missing."""
    if lane.requires.p2p == "required":
        return P2pDecision(environment=_OFF, tier=tier, gap=gap, refusal=gap.problem)
    note = f"starts with P2P off (NCCL_P2P_DISABLE=1): {gap.problem}"
    return P2pDecision(environment=_OFF, tier=tier, gap=gap, note=note)


def grant_gap(lane: Lane, proofs: Proofs, running: str | None, driver: DriverFacts) -> Gap | None:
    """Why P2P does not count as granted for what is loaded now; None: it is."""
    proof = proofs.grant
    if proof is None:
        unseen = "the gate has not seen the driver grant P2P since this boot"
        return Gap(problem=proofs.grant_problem or unseen, remedy=_ASK_THE_GATE)
    if changed := list(_changes(proof, running, driver)):
        what = f"what the gate saw at {proof.created} is about another {' and '.join(changed)}"
        return Gap(problem=what, remedy=_ASK_THE_GATE)
    if len(proof.cards) < lane.cards_needed:
        return Gap(
            problem=f"P2P was granted between {len(proof.cards)} cards, "
            f"the lane spreads over {lane.cards_needed}",
            remedy="gpuguard doctor tells why a card is missing; "
            "else lower the lane's parallel sizes",
        )
    if (together := _together(proof)) < lane.cards_needed:
        return Gap(
            problem=f"P2P was granted over {proof.pairs} ordered pairs of {len(proof.cards)} "
            f"cards, between each two of the first {together} on the PCI bus only; the lane "
            f"spreads over the first {lane.cards_needed}",
            remedy="gpuguard verify shows which pairs are expected (p2p.groups, p2p.gpus, "
            "p2p.exclude, accepted pairs): expect all of the lane's, else lower its parallel "
            "sizes or set requires: {p2p: none}",
        )
    return None


def _together(proof: Proof) -> int:
    """So many cards, from the first on the PCI bus on, were granted P2P with each other."""
    if proof.together is not None:
        return proof.together
    number = len(proof.cards)  # written by a gpuguard that counted pairs alone
    return number if proof.pairs >= number * (number - 1) else min(number, 1)


def _order(lane: Lane, proofs: Proofs) -> dict[str, str]:
    """Where not all cards reach each other, the engine must count them as the proof does."""
    proof = proofs.grant
    if proof is None or not crosses_cards(lane) or proof.visible in (None, proof.together):
        return {}
    return dict(_BUS_ORDER)


def bytes_gap(proofs: Proofs, running: str | None, driver: DriverFacts) -> Gap | None:
    """Why bytes have not shown P2P to work with what is loaded now; None: they have."""
    deep = proofs.deep
    if deep is None:
        unseen = "no bytes have been moved between the cards since this boot"
        return Gap(problem=proofs.deep_problem or unseen, remedy=_MOVE_BYTES, is_provable=True)
    if changed := list(_changes(deep, running, driver)):
        what = f"bytes were moved at {deep.created} with another {' and '.join(changed)}"
        return Gap(problem=what, remedy=_MOVE_BYTES, is_provable=True)
    if deep.problem is not None and deep.is_fault:
        return Gap(problem=f"verify --deep at {deep.created}: {deep.problem}", remedy=_MEND)
    granted = () if proofs.grant is None else proofs.grant.cards
    if missed := set(granted) - set(deep.cards):
        what = f"no bytes were moved over {', '.join(sorted(missed))} at {deep.created}"
        return Gap(problem=what, remedy=_MOVE_BYTES, is_provable=True, was_tried=True)
    if deep.problem is not None:
        what = f"verify --deep at {deep.created} could not tell: {deep.problem}"
        return Gap(problem=what, remedy=_MOVE_BYTES, is_provable=True, was_tried=True)
    return None


def _changes(proof: Proof | DeepProof, running: str | None, driver: DriverFacts) -> Iterator[str]:
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
