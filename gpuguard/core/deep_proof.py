"""Grant and bytes together: what ``verify --deep`` thinks of the host as a whole."""

from __future__ import annotations

from dataclasses import replace

from gpuguard.core.deep import DeepJudgement
from gpuguard.core.deep_facts import CollectiveFacts
from gpuguard.core.deep_findings import collective_verdict
from gpuguard.core.findings import Finding, Severity, verdict_of
from gpuguard.core.verify import Verification

#: Said of a grant that nobody has proven yet.
_DOUBTS = frozenset({"virtualised"})


def proven_by(verification: Verification, judgement: DeepJudgement) -> Verification:
    """The verification with what the bytes have shown; a proven path leaves no doubt about it."""
    findings = verification.findings
    if judgement.healthy is True:
        findings = tuple(f for f in findings if f.code not in _DOUBTS)
    together = (*findings, *judgement.findings)
    return replace(verification, findings=together, verdict=verdict_of(together))


def missing_proof(judgement: DeepJudgement, collective: CollectiveFacts | None) -> str | None:
    """Why all this is no proof that a serving stack may use P2P; None: it is one.

    It takes every expected pair, and an all-reduce that was right and went over P2P.
    """
    for severity in (Severity.CRITICAL, Severity.UNKNOWN):
        for finding in judgement.findings:
            if finding.severity is severity:
                return _told(finding)
    if judgement.healthy is not True:
        return "no pair of cards was tested"
    if not reduces(collective):
        why = collective.problem if collective is not None else None
        return "no all-reduce was tried" + (f": {why}" if why else "")
    return None


def reduces(collective: CollectiveFacts | None) -> bool:
    """Were the sums of an all-reduce over P2P right."""
    if collective is None or collective.with_p2p is None or collective.without_p2p is None:
        return False
    return collective_verdict(collective.with_p2p, collective.without_p2p) == "healthy"


def _told(finding: Finding) -> str:
    """With its first evidence: the pair."""
    where = next((f" ({name}: {text})" for name, text in finding.evidence.items()), "")
    more = len(finding.evidence) - 1
    return f"{finding.message}{where}" + (f", and {more} more" if more > 0 else "")
