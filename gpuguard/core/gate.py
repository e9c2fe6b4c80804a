"""The gate's word in one line: for ``systemctl status``, the log and the page."""

from __future__ import annotations

from gpuguard.core.findings import Severity
from gpuguard.core.verify import Verification, VerifyFacts

_ORDER = (Severity.CRITICAL, Severity.UNKNOWN, Severity.WARNING)


def is_open(verification: Verification) -> bool:
    """As ``verify`` exits: 0 opens it."""
    return verification.exit_status == 0


def gate_line(facts: VerifyFacts, verification: Verification, *, nodes: bool) -> str:
    """What was proven, or what is wrong and what to do.

    Args:
        facts: what was looked at.
        verification: what is thought of it.
        nodes: the device nodes were there in time.
    """
    if is_open(verification):
        grant = verification.grant
        pairs = len(grant.expected.expected_pairs(grant.seen))
        driver = facts.driver.loaded
        module = f"module {driver} ({facts.loaded})" if driver else "no driver is loaded"
        by = f" by {'+'.join(verification.sources)}" if verification.sources else ""
        line = f"{len(grant.seen)} cards, all {pairs} ordered pairs granted{by}, {module}"
        return f"gate open: {line}{_others(verification, shown=0)}"
    worst = min(verification.findings, key=lambda finding: _ORDER.index(finding.severity))
    late = "" if nodes else " (the device nodes did not come in time)"
    what = f"{worst.message}{late} [{worst.code}]; {worst.remedy}"
    return f"gate shut: {what}{_others(verification, shown=1)}"


def _others(verification: Verification, *, shown: int) -> str:
    more = len(verification.findings) - shown
    return f"; {more} more in gpuguard verify" if more > 0 else ""
