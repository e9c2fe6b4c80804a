"""Grant and bytes together: what ``verify --deep`` thinks of the host as a whole."""

from __future__ import annotations

from dataclasses import replace

from gpuguard.core.deep import DeepJudgement
from gpuguard.core.findings import verdict_of
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
