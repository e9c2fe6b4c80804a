"""Findings of the deep check: one code for each kind of verdict, pairs as the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpuguard.core.deep import (
    Baseline,
    DeepJudgement,
    DeepVerdict,
    PairVerdict,
    conclude,
    judge_pairs,
)
from gpuguard.core.deep_facts import CollectiveFacts, CollectiveOutcome, CollectiveRun, DeepFacts
from gpuguard.core.findings import Finding, Severity

_SAFE = "until then keep frameworks off P2P: NCCL_P2P_DISABLE=1"
_MEANING = {
    DeepVerdict.WRONG_DATA: (
        "deep-wrong-data",
        Severity.CRITICAL,
        "the driver grants P2P, and wrong data arrives",
        f"find the cause: gpuguard doctor (IOMMU, ACS, BAR1, virtualisation); {_SAFE}",
    ),
    DeepVerdict.HANG: (
        "deep-hang",
        Severity.CRITICAL,
        "the driver grants P2P, and a transfer never ends",
        f"find the cause: gpuguard doctor (ACS, IOMMU); {_SAFE}",
    ),
    DeepVerdict.TRANSFER_ERROR: (
        "deep-transfer-error",
        Severity.CRITICAL,
        "the driver grants P2P, and CUDA gives up on a transfer",
        f"see dmesg for NVRM and Xid lines; {_SAFE}",
    ),
    DeepVerdict.IMPLAUSIBLE: (
        "deep-implausible",
        Severity.CRITICAL,
        "data seems to move faster than the link can carry it, so it does not take the link",
        f"find the cause: gpuguard doctor (a display on the card, BAR1); {_SAFE}",
    ),
    DeepVerdict.INCONCLUSIVE: (
        "deep-inconclusive",
        Severity.UNKNOWN,
        "it could not be told whether data arrives",
        "see the reason; with too little memory free: --size",
    ),
}

Name = Callable[[str], str]
DEFAULT_REGRESSED_BELOW = 0.8


def judge(
    facts: DeepFacts,
    baseline: Baseline | None = None,
    *,
    regressed_below: float = DEFAULT_REGRESSED_BELOW,
) -> DeepJudgement:
    """Judge the deep check.

    Args:
        facts: what was seen.
        baseline: bandwidths that were accepted once.
        regressed_below: share of the baseline that is still fine.
    """
    pairs = judge_pairs(facts, baseline or {}, regressed_below)
    return conclude(facts, pairs, deep_findings(facts, pairs))


def card_name(facts: DeepFacts) -> Name:
    """How a card is called for people: index and bus id."""
    cards = {card.uuid: card for card in facts.cards}

    def name(uuid: str) -> str:
        card = cards.get(uuid)
        return uuid if card is None else f"GPU{card.index} ({card.pci_bus_id})"

    return name


def deep_findings(facts: DeepFacts, pairs: Sequence[PairVerdict]) -> Iterator[Finding]:
    """Everything that is wrong, or could not be told."""
    name = card_name(facts)
    if facts.problem is not None:
        yield Finding(
            code=facts.problem_code,
            severity=Severity.UNKNOWN,
            subject="deep check",
            message=facts.problem,
            remedy=facts.remedy,
            evidence=dict(facts.evidence),
        )
    yield from _no_grant([pair for pair in pairs if facts.expects(pair.pair)], name)
    for verdict in _MEANING:
        yield from _of_verdict(verdict, pairs, name)
    yield from _regressed(pairs, name)
    yield from _incomplete(facts, pairs)
    if facts.collective is not None:
        yield from _collective(facts.collective)


def _no_grant(pairs: Sequence[PairVerdict], name: Name) -> Iterator[Finding]:
    refused = [pair for pair in pairs if pair.pair.grant is False]
    if refused:
        yield Finding(
            code="deep-no-grant",
            severity=Severity.CRITICAL,
            subject="deep check",
            message=f"the driver grants no peer access on {len(refused)} of {len(pairs)} pairs",
            remedy="see whether the loaded module is patched: gpuguard status",
            evidence={_arrow(pair, name): "no peer access" for pair in refused},
        )


def _of_verdict(
    verdict: DeepVerdict, pairs: Sequence[PairVerdict], name: Name
) -> Iterator[Finding]:
    code, severity, message, remedy = _MEANING[verdict]
    evidence = {
        f"{_arrow(pair, name)}, {engine.engine}": engine.reason
        for pair in pairs
        for engine in pair.engines
        if engine.verdict is verdict and _is_to_report(pair, verdict)
    }
    evidence |= {
        _arrow(pair, name): pair.reason
        for pair in pairs
        if pair.verdict is verdict
        and _is_to_report(pair, verdict)
        and all(engine.verdict is not verdict for engine in pair.engines)
    }
    if evidence:
        yield Finding(
            code=code,
            severity=severity,
            subject="deep check",
            message=message,
            remedy=remedy,
            evidence=evidence,
        )


def _is_to_report(pair: PairVerdict, verdict: DeepVerdict) -> bool:
    """A refused pair is told elsewhere; untried engines of a bad pair are no news."""
    if verdict is not DeepVerdict.INCONCLUSIVE:
        return True
    return pair.pair.grant is not False and pair.verdict is DeepVerdict.INCONCLUSIVE


def _regressed(pairs: Sequence[PairVerdict], name: Name) -> Iterator[Finding]:
    evidence = {
        f"{_arrow(pair, name)}, {engine}": f"{share:.0%} of the accepted bandwidth"
        for pair in pairs
        for engine, share in pair.regressed
    }
    if evidence:
        yield Finding(
            code="bandwidth-regressed",
            severity=Severity.WARNING,
            subject="deep check",
            message="data arrives, and slower than when the baseline was accepted",
            remedy="gpuguard doctor (link speed and width, ACS); if it is meant to be so: --accept",
            evidence=evidence,
        )


def _incomplete(facts: DeepFacts, pairs: Sequence[PairVerdict]) -> Iterator[Finding]:
    count = len(facts.cards)
    real = sum(pair.pair.src != pair.pair.dst for pair in pairs)
    if count == 1 and facts.problem is None:
        yield Finding(
            code="deep-no-pair",
            severity=Severity.UNKNOWN,
            subject="deep check",
            message="no pair tested: one card; the method was tried on its own memory",
            remedy="nothing to do on a host with one card",
        )
    elif facts.problem is None and real != count * (count - 1):
        yield Finding(
            code="deep-incomplete",
            severity=Severity.UNKNOWN,
            subject="deep check",
            message=f"{real} of {count * (count - 1)} ordered pairs were reached",
            remedy="do nvidia-smi and CUDA see the same cards?",
        )


def _collective(facts: CollectiveFacts) -> Iterator[Finding]:
    if facts.with_p2p is None or facts.without_p2p is None:
        return  # NCCL is not there: said in the output, no finding
    evidence = {
        f"P2P {word}": f"{run.outcome}{f' via {run.transport}' if run.transport else ''}"
        f"{f': {run.detail}' if run.detail else ''}"
        for word, run in (("on", facts.with_p2p), ("off", facts.without_p2p))
    }
    told = _collective_told(facts.with_p2p, facts.without_p2p)
    if told is not None:
        code, severity, message, remedy = told
        yield Finding(
            code=code,
            severity=severity,
            subject="all-reduce",
            message=message,
            remedy=remedy,
            evidence=evidence,
        )


def _collective_told(
    on: CollectiveRun, off: CollectiveRun
) -> tuple[str, Severity, str, str] | None:
    verdict = collective_verdict(on, off)
    if verdict == "healthy":
        return None
    if verdict == "inconclusive":
        return (
            "collective-inconclusive",
            Severity.UNKNOWN,
            "the all-reduce fails with P2P off as well, or did not use P2P: nothing is proven",
            "look at NCCL's own messages: NCCL_DEBUG=INFO",
        )
    word = "hangs" if verdict == "hang" else "gives wrong sums or fails"
    return (
        f"collective-{verdict}",
        Severity.CRITICAL,
        f"an all-reduce {word} with P2P on and is right with it off: P2P is the culprit",
        f"find the cause: gpuguard doctor; {_SAFE}",
    )


def collective_verdict(on: CollectiveRun, off: CollectiveRun) -> str:
    """``healthy``, ``hang``, ``wrong-data``, ``transfer-error`` or ``inconclusive``.

    P2P is blamed only where the same all-reduce is right without it; right sums that NCCL
    carried through host memory say nothing about P2P.
    """
    if on.outcome is CollectiveOutcome.OK:
        return "healthy" if (on.transport or "").startswith("P2P") else "inconclusive"
    if off.outcome is not CollectiveOutcome.OK:
        return "inconclusive"
    if on.outcome is CollectiveOutcome.ERROR:
        return "transfer-error"
    return on.outcome.value


def _arrow(pair: PairVerdict, name: Name) -> str:
    return f"{name(pair.pair.src)} -> {name(pair.pair.dst)}"
