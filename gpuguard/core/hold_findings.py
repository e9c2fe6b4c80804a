"""What is wrong with the holds of a host, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpuguard.core.findings import Finding, Severity
from gpuguard.core.holds import HoldFacts, HoldState, SteppedOver, WithheldRecord

_SUBJECT = "holds"
_PIN_FILE = "/etc/apt/preferences.d/gpuguard-renamed"
_NAMED = 4  # a host has 50 packages of kernel and driver
_BY_ITSELF = "; the next automatic run does it, too"


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
        yield _warning(
            code="hold-lifted",
            message=f"{_count(state.lifted)} still free after a change that was interrupted",
            remedy=f"sudo gpuguard hold{_BY_ITSELF}",
            evidence=dict.fromkeys(state.lifted, "gpuguard's, not on hold"),
        )
    if state.drifted:
        yield _warning(
            code="hold-drift",
            message=f"{_count(state.drifted)} lost the hold that gpuguard set",
            remedy=f"sudo gpuguard hold{_BY_ITSELF if enforced else ''}; or, if it was meant: "
            f"sudo gpuguard unhold {' '.join(state.drifted)}",
            evidence={
                name: facts.evidence.get(name, "in no log who did it") for name in state.drifted
            },
        )
    if state.missing:
        yield _warning(
            code="hold-missing",
            message=f"{_count(state.missing)} meant by holds.packages and not on hold",
            remedy=f"sudo gpuguard hold{_BY_ITSELF if enforced else ''}",
            evidence=dict.fromkeys(state.missing, "not on hold"),
        )
    if state.stepped_over:
        names = [one.name for one in state.stepped_over]
        yield _warning(
            code="hold-stepped-over",
            message=f"{_count(names)} that gpuguard held changed, and not in a window",
            remedy="look at the rest of gpuguard status; sudo gpuguard hold accepts the version",
            evidence={one.name: _who(one, facts) for one in state.stepped_over},
        )
    if state.ineffective:
        yield _warning(
            code="hold-ineffective",
            message=f"{_count([hold.name for hold in state.ineffective])} on hold to no effect",
            remedy=_instead(state),
            evidence={hold.name: hold.reason for hold in state.ineffective},
        )


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


def _instead(state: HoldState) -> str:
    instead = sorted({name for hold in state.ineffective for name in hold.instead})
    left_over = [hold.name for hold in state.ineffective if not hold.instead]
    remedies = [f"sudo gpuguard hold {' '.join(instead)}"] if instead else []
    if ours := [name for name in left_over if name in state.ours]:
        remedies.append(f"sudo gpuguard unhold {' '.join(ours)}")
    if foreign := [name for name in left_over if name in state.foreign]:
        remedies.append(f"sudo apt-mark unhold {' '.join(foreign)}")
    renamed = {n: v for hold in state.ineffective for n, v in hold.renamed.items()}
    if renamed:
        remedies.append(f"and beside the holds, which end with a name: {_pin(renamed)}")
    return "; ".join(remedies)


def _pin(renamed: Mapping[str, str]) -> str:
    """What to paste: apt keeps these packages at the versions that they have."""
    stanzas = "\\n\\n".join(
        f"Package: {name.partition(':')[0]}\\nPin: version {version}\\nPin-Priority: 1001"
        for name, version in sorted(renamed.items())
    )
    return f"printf '{stanzas}\\n' | sudo tee {_PIN_FILE} (away with it for a window)"


def _who(one: SteppedOver, facts: HoldFacts) -> str:
    change = f"{one.recorded} -> {one.version}"
    return f"{change}; {facts.evidence[one.name]}" if one.name in facts.evidence else change


def _warning(code: str, *, message: str, remedy: str, evidence: Mapping[str, str]) -> Finding:
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
