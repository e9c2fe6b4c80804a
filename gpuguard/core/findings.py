"""What is wrong with a host, in words that an operator can act on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """How bad one finding is; UNKNOWN means "could not look", which is never fine."""

    WARNING = "warning"
    UNKNOWN = "unknown"
    CRITICAL = "critical"


class Verdict(StrEnum):
    """The host in one word."""

    OK = "ok"
    WARNING = "warning"
    UNKNOWN = "unknown"
    CRITICAL = "critical"


_RANK = (Verdict.OK, Verdict.WARNING, Verdict.UNKNOWN, Verdict.CRITICAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One statement with its evidence and what to do; ``code`` is stable."""

    code: str
    severity: Severity
    subject: str  # kernel release, module, card, package
    message: str
    remedy: str = ""
    evidence: dict[str, str] = field(default_factory=dict)


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    """The worst finding decides; known bad outranks unknown, unknown outranks a warning."""
    worst = Verdict.OK
    for finding in findings:
        candidate = Verdict(finding.severity.value)
        if _RANK.index(candidate) > _RANK.index(worst):
            worst = candidate
    return worst
