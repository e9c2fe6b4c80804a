"""What is wrong with the holds of a host, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpuguard.core.findings import Finding, Severity
from gpuguard.core.holds import HoldFacts, HoldState, WithheldRecord

_SUBJECT = "holds"
_NAMED = 4  # a host has 50 packages of kernel and driver


def hold_findings(facts: HoldFacts, state: HoldState, *, enforced: bool) -> Iterator[Finding]:
    """One finding a kind, all packages in its evidence."""
    if state.problem is not None:
        yield Finding(
            code="holds-unknown",
            severity=Severity.UNKNOWN,
            subject=_SUBJECT,
            message=f"which packages are on hold, and whose holds they are: {state.problem}",
            remedy="see that the file can be read, then: gpuguard holds",
        )
        return
    if state.lifted and not facts.at_work:
        yield _finding(
            "hold-lifted",
            f"{_count(state.lifted)} still lifted by a change that was interrupted",
            "sudo gpuguard hold (the next automatic run does it, too)",
            dict.fromkeys(state.lifted, "ours, not on hold"),
        )
    if state.drifted:
        later = "; the next automatic run holds again" if enforced else ""
        yield _finding(
            "hold-drift",
            f"{_count(state.drifted)} lost the hold that gpuguard set",
            f"sudo gpuguard hold{later}; or, if it was meant: sudo gpuguard unhold "
            + " ".join(state.drifted),
            {
                name: facts.evidence.get(name, "on hold in the ledger, not in dpkg")
                for name in state.drifted
            },
        )
    if state.missing:
        yield _finding(
            "hold-missing",
            f"{_count(state.missing)} meant by holds.packages and not on hold",
            "sudo gpuguard hold" + ("; the next automatic run does it, too" if enforced else ""),
            dict.fromkeys(state.missing, "not on hold"),
        )
    yield from _not_kept(facts, state)


def withheld_findings(record: WithheldRecord) -> Iterator[Finding]:
    """That nobody can say what the holds keep away; for those who were asked just that."""
    if record.problem is not None:
        yield Finding(
            code="withheld-unknown",
            severity=Severity.UNKNOWN,
            subject=_SUBJECT,
            message=f"which upgrades are withheld could not be told: {record.problem}",
            remedy="see that apt-cache policy works, then: gpuguard holds",
        )


def _not_kept(facts: HoldFacts, state: HoldState) -> Iterator[Finding]:
    if state.stepped_over:
        yield _finding(
            "hold-stepped-over",
            f"{_count([one.name for one in state.stepped_over])} that gpuguard held "
            "changed, and not in a window",
            "look whether gpuguard status is as it should be; sudo gpuguard hold then keeps the "
            "new version",
            {
                one.name: "; ".join(
                    filter(
                        None,
                        (f"{one.recorded} -> {one.version}", facts.evidence.get(one.name, "")),
                    )
                )
                for one in state.stepped_over
            },
        )
    if state.ineffective:
        instead = sorted({name for hold in state.ineffective for name in hold.instead})
        left_over = [hold.name for hold in state.ineffective if not hold.instead]
        remedies = []
        if instead:
            remedies.append(f"sudo gpuguard hold {' '.join(instead)}")
        if left_over:
            remedies.append(f"sudo apt-mark unhold {' '.join(left_over)}")
        yield _finding(
            "hold-ineffective",
            f"{_count([hold.name for hold in state.ineffective])} on hold to no effect",
            "; ".join(remedies),
            {hold.name: hold.reason for hold in state.ineffective},
        )


def _finding(code: str, message: str, remedy: str, evidence: Mapping[str, str]) -> Finding:
    return Finding(
        code=code,
        severity=Severity.WARNING,
        subject=_SUBJECT,
        message=message,
        remedy=remedy,
        evidence=dict(evidence),
    )


def _count(names: Iterable[str]) -> str:
    """``2 packages (a, b)``, at most ``_NAMED`` by name."""
    found = list(names)
    shown = ", ".join(found[:_NAMED]) + (", …" if len(found) > _NAMED else "")
    return f"{len(found)} package{'' if len(found) == 1 else 's'} ({shown})"
