"""Findings of the deep check: one code for each kind of verdict, pairs as the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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

_SUBJECT = "deep check"
_SAFE = "until then keep frameworks off P2P: NCCL_P2P_DISABLE=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meaning:
    """What a kind of finding says; ``severity`` is critical unless it says otherwise."""

    code: str
    message: str
    remedy: str
    severity: Severity = Severity.CRITICAL

    def finding(self, subject: str, evidence: dict[str, str]) -> Finding:
        return Finding(
            code=self.code,
            severity=self.severity,
            subject=subject,
            message=self.message,
            remedy=self.remedy,
            evidence=evidence,
        )


_MEANING = {
    DeepVerdict.WRONG_DATA: _Meaning(
        code="deep-wrong-data",
        message="the driver grants P2P, and wrong data arrives",
        remedy=f"find the cause: gpuguard doctor (IOMMU, ACS, BAR1, virtualisation); {_SAFE}",
    ),
    DeepVerdict.HANG: _Meaning(
        code="deep-hang",
        message="the driver grants P2P, and a transfer never ends",
        remedy=f"find the cause: gpuguard doctor (ACS, IOMMU); {_SAFE}",
    ),
    DeepVerdict.TRANSFER_ERROR: _Meaning(
        code="deep-transfer-error",
        message="the driver grants P2P, and CUDA gives up on a transfer",
        remedy=f"see dmesg for NVRM and Xid lines; {_SAFE}",
    ),
    DeepVerdict.IMPLAUSIBLE: _Meaning(
        code="deep-implausible",
        message="data seems to move faster than the link can carry it: it does not take the link",
        remedy=f"find the cause: gpuguard doctor (a display on the card, BAR1); {_SAFE}",
    ),
    DeepVerdict.INCONCLUSIVE: _Meaning(
        code="deep-inconclusive",
        message="it could not be told whether data arrives",
        remedy="see the reason; with too little memory free: --size",
        severity=Severity.UNKNOWN,
    ),
}
_REFUSED = _Meaning(
    code="deep-no-grant",
    message="the driver grants no peer access where there has to be one",
    remedy="see whether the loaded module is patched: gpuguard status",
)
_REGRESSED = _Meaning(
    code="bandwidth-regressed",
    message="data arrives, and slower than when the baseline was accepted",
    remedy="gpuguard doctor (link speed and width, ACS); if it is meant to be so: --accept",
    severity=Severity.WARNING,
)
_NO_PAIR = _Meaning(
    code="deep-no-pair",
    message="no pair tested: one card; the method was tried on its own memory",
    remedy="nothing to do on a host with one card",
    severity=Severity.UNKNOWN,
)
_CULPRIT = "with P2P on, and is right with it off: P2P is the culprit"
_COLLECTIVE = {
    "hang": _Meaning(
        code="collective-hang",
        message=f"an all-reduce hangs {_CULPRIT}",
        remedy=f"find the cause: gpuguard doctor; {_SAFE}",
    ),
    "wrong-data": _Meaning(
        code="collective-wrong-data",
        message=f"an all-reduce gives wrong sums {_CULPRIT}",
        remedy=f"find the cause: gpuguard doctor; {_SAFE}",
    ),
    "transfer-error": _Meaning(
        code="collective-transfer-error",
        message=f"an all-reduce fails {_CULPRIT}",
        remedy=f"see dmesg for NVRM and Xid lines; {_SAFE}",
    ),
    "inconclusive": _Meaning(
        code="collective-inconclusive",
        message="the all-reduce fails with P2P off as well, or did not use P2P: nothing is proven",
        remedy="look at NCCL's own messages: NCCL_DEBUG=INFO",
        severity=Severity.UNKNOWN,
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
            code=facts.problem.code,
            severity=Severity.UNKNOWN,
            subject=_SUBJECT,
            message=facts.problem.text,
            remedy=facts.problem.remedy,
            evidence=dict(facts.problem.evidence),
        )
    yield from _no_grant([pair for pair in pairs if facts.expects(pair.pair)], name)
    for verdict in _MEANING:
        yield from _of_verdict(verdict, pairs, name)
    yield from _regressed(pairs, name)
    if len(facts.cards) == 1 and facts.problem is None:
        yield _NO_PAIR.finding(_SUBJECT, {})
    if facts.collective is not None:
        yield from _collective(facts.collective)


def _no_grant(pairs: Sequence[PairVerdict], name: Name) -> Iterator[Finding]:
    refused = {_arrow(pair, name): "no peer access" for pair in pairs if pair.pair.grant is False}
    if refused:
        yield _REFUSED.finding(_SUBJECT, refused)


def _of_verdict(
    verdict: DeepVerdict, pairs: Sequence[PairVerdict], name: Name
) -> Iterator[Finding]:
    evidence: dict[str, str] = {}
    for pair in pairs:
        if not _is_to_report(pair, verdict):
            continue
        engines = [engine for engine in pair.engines if engine.verdict is verdict]
        evidence |= {f"{_arrow(pair, name)}, {e.engine}": e.reason for e in engines}
        if pair.verdict is verdict and not engines:
            evidence[_arrow(pair, name)] = pair.reason
    if evidence:
        yield _MEANING[verdict].finding(_SUBJECT, evidence)


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
        yield _REGRESSED.finding(_SUBJECT, evidence)


def _collective(facts: CollectiveFacts) -> Iterator[Finding]:
    if facts.with_p2p is None or facts.without_p2p is None:
        return  # NCCL is not there: said in the output, no finding
    verdict = collective_verdict(facts.with_p2p, facts.without_p2p)
    if verdict in _COLLECTIVE:
        evidence = {"P2P on": _told(facts.with_p2p), "P2P off": _told(facts.without_p2p)}
        yield _COLLECTIVE[verdict].finding("all-reduce", evidence)


def _told(run: CollectiveRun) -> str:
    via = f" via {run.transport}" if run.transport else ""
    return f"{run.outcome}{via}{f': {run.detail}' if run.detail else ''}"


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
