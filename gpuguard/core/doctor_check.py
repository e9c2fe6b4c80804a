"""What a check of the doctor answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from gpuguard.core.doctor_facts import DoctorFacts, Unread
from gpuguard.core.findings import Finding, Severity


class CheckState(StrEnum):
    """The result of one check in one word."""

    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not-applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Finding):
    """A finding that also says which file or tool it rests on."""

    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One named check; ``notes`` are worth knowing and no fault."""

    name: str
    state: CheckState
    summary: str
    notes: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()


def conclude(
    name: str, fine: str, causes: Iterable[Cause] = (), notes: Iterable[str] = ()
) -> Check:
    """A check from what it found; ``fine`` is the summary if it found nothing."""
    found = tuple(causes)
    if any(cause.severity is not Severity.UNKNOWN for cause in found):
        state = CheckState.PROBLEM
    else:
        state = CheckState.UNKNOWN if found else CheckState.OK
    summary = _summary(found) if found else fine
    return Check(name=name, state=state, summary=summary, notes=tuple(notes), causes=found)


def not_applicable(name: str, why: str, notes: Iterable[str] = ()) -> Check:
    """A check that has nothing to look at."""
    return Check(name=name, state=CheckState.NOT_APPLICABLE, summary=why, notes=tuple(notes))


def not_read(subject: str, unread: Unread, remedy: str = "", *, code: str) -> Cause:
    """The cause that stands for "could not look"; its code ends in ``-unknown``."""
    return Cause(
        code=code,
        severity=Severity.UNKNOWN,
        subject=subject,
        message=f"{unread.place} could not be read: {unread.why}",
        remedy=remedy or "run gpuguard doctor as root",
        source=unread.place,
    )


def without_cards(facts: DoctorFacts) -> str:
    """Why a check of the cards has nothing to look at."""
    if isinstance(facts.cards, Unread):
        return "the cards could not be looked at"
    return "no cards to look at"


def plural(count: int, noun: str) -> str:
    """``1 card``, ``4 cards``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _summary(causes: tuple[Cause, ...]) -> str:
    """``acs-redirect: 0000:00:01.0, 0000:00:03.0``, one part per code."""
    subjects: dict[str, list[str]] = {}
    for cause in causes:
        names = subjects.setdefault(cause.code, [])
        if cause.subject not in names:
            names.append(cause.subject)
    return "; ".join(f"{code}: {', '.join(names)}" for code, names in subjects.items())
