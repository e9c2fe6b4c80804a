"""Does gpuguard still work by itself: is what ``gpuguard setup`` installed there and alive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.core.findings import Finding, Severity

#: The timer comes every six hours; one that was missed is no news yet.
STALE_SECONDS = 13 * 3600.0
#: A host that was off for long looks after itself within minutes of its boot.
_SETTLED_SECONDS = 3600.0
_AGAIN = "gpuguard setup"


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomationFacts:
    """What a set-up has left behind, as it is now.

    ``faults``: hooks that are not as installed, path -> why. ``program`` is what hooks and units
    call. ``stopped``: units that should run and do not, unit -> state; empty where systemd is not
    at work. ``idle_seconds``: since the last automatic run, or since the set-up if there was none;
    None where that means nothing (a directory tree). ``problem``: why it could not be looked at.
    """

    program: str = ""
    program_is_there: bool = True
    faults: tuple[tuple[str, str], ...] = ()
    disabled: tuple[str, ...] = ()
    stopped: tuple[tuple[str, str], ...] = ()
    is_configured: bool = True
    idle_seconds: float | None = None
    up_seconds: float | None = None
    problem: str | None = None


def automation_findings(facts: AutomationFacts | None) -> Iterator[Finding]:
    """What is wrong with it; nothing where nothing was set up."""
    if facts is None:
        return
    if facts.problem is not None:
        yield _finding(
            code="automation-unknown",
            message=f"whether gpuguard still works by itself could not be told: {facts.problem}",
            remedy="as root: gpuguard status; then gpuguard setup",
            severity=Severity.UNKNOWN,
        )
    yield from _hooks(facts)
    yield from _units(facts)
    yield from _runs(facts)


def _hooks(facts: AutomationFacts) -> Iterator[Finding]:
    if not facts.program_is_there:
        yield _finding(
            code="hook-dead",
            message=f"hooks and units call {facts.program}, which is not there (or no program)",
            remedy=f"install gpuguard there again, or run {_AGAIN} from where it is now",
        )
    elif facts.faults:
        named = ", ".join(f"{path} is {why}" for path, why in facts.faults)
        # what somebody has changed, its mode included, is put back by force alone
        is_missing = all(why == "missing" for _, why in facts.faults)
        yield _finding(
            code="hook-dead",
            message=f"a hook may not work: {named}",
            remedy=_AGAIN if is_missing else f"{_AGAIN} --force",
            evidence=dict(facts.faults),
        )


def _units(facts: AutomationFacts) -> Iterator[Finding]:
    dead = {**dict.fromkeys(facts.disabled, "disabled"), **dict(facts.stopped)}
    if dead:
        named = ", ".join(f"{unit} is {state}" for unit, state in dead.items())
        yield _finding(
            code="automation-off",
            message=f"gpuguard does not do all of its work by itself: {named}",
            remedy=f"{_AGAIN} --force"
            if facts.disabled
            else f"see systemctl status UNIT; then {_AGAIN}",
            evidence=dead,
        )
    if not facts.is_configured:
        yield _finding(
            code="automation-off",
            message="there is no configuration, so nothing is rebuilt by itself",
            remedy="gpuguard config init",
        )


def _runs(facts: AutomationFacts) -> Iterator[Finding]:
    if facts.idle_seconds is None or not facts.is_configured:
        return
    is_settled = facts.up_seconds is None or facts.up_seconds >= _SETTLED_SECONDS
    if is_settled and facts.idle_seconds >= STALE_SECONDS:
        hours = int(facts.idle_seconds // 3600)
        yield _finding(
            code="automation-stale",
            message=f"no automatic run has come to its end for {hours} hours; one is due every 6",
            remedy="see why: systemctl status gpuguard-rebuild.timer gpuguard-rebuild.service",
        )


def _finding(
    *,
    code: str,
    message: str,
    remedy: str,
    severity: Severity = Severity.WARNING,
    evidence: dict[str, str] | None = None,
) -> Finding:
    return Finding(
        code=code,
        severity=severity,
        subject="gpuguard",
        message=message,
        remedy=remedy,
        evidence=evidence or {},
    )
