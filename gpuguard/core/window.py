"""What is to be said of a maintenance window that is not closed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.core.findings import Finding, Severity

_LONG_SECONDS = 7 * 24 * 3600.0
_DAY = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFacts:
    """The window that is open or waits for its boot; times are RFC 3339, UTC.

    ``is_left``: it is open, and the process that opened it is gone. ``seconds``: how long it has
    been in its phase. ``problem``: its record cannot be read; then nothing else is known.
    """

    id: str = ""
    phase: str = ""
    started: str = ""
    since: str = ""
    seconds: float = 0.0
    outcome: str = ""
    is_waiting: bool = False
    is_left: bool = False
    holds_are_off: bool = False
    problem: str | None = None


def window_findings(window: WindowFacts | None) -> Iterator[Finding]:
    """A window that nobody closes."""
    if window is None:
        return
    if window.problem is not None:
        yield Finding(
            code="window-unreadable",
            severity=Severity.UNKNOWN,
            subject="maintenance window",
            message=window.problem,
            remedy="see that all is on hold (gpuguard holds), then move the file away",
        )
    elif window.is_left:
        holds = "; packages may not be on hold" if window.holds_are_off else ""
        yield Finding(
            code="window-interrupted",
            severity=Severity.WARNING,
            subject="maintenance window",
            message=f"the one of {window.started} was interrupted ({window.phase}){holds}",
            remedy="gpuguard rebuild: every verb that changes the host holds again first",
        )
    elif window.is_waiting and window.seconds > _LONG_SECONDS:
        yield Finding(
            code="window-waits-for-boot",
            severity=Severity.WARNING,
            subject="maintenance window",
            message=f"what was installed in the one of {window.started} has waited for its boot "
            f"for {window.seconds / _DAY:.0f} days",
            remedy="reboot when gpuguard status says that it is safe",
        )


def window_summary(window: WindowFacts | None) -> dict[str, object] | None:
    """For the status document; None: no window is open and none waits."""
    if window is None:
        return None
    return {
        "id": window.id,
        "phase": window.phase,
        "started": window.started,
        "since": window.since,
        "outcome": window.outcome,
        "interrupted": window.is_left,
        "problem": window.problem,
    }
