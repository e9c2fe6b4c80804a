"""What is worth a line in the log: what has changed between two observations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuguard.core.observation import Observation

_PRIORITY = {"ok": "notice", "warning": "warning", "unknown": "error", "critical": "critical"}


@dataclass(frozen=True, slots=True)
class Event:
    """One line, and its fields."""

    message: str
    priority: str = "info"
    fields: Mapping[str, str] = field(default_factory=dict)


def verdict_of(observation: Observation | None) -> str:
    """The host in one word; before the first look: unknown."""
    for entry in observation.verdict if observation is not None else ():
        if entry.name == "gpuguard_verdict" and entry.value:
            return entry.labels[0]
    return "unknown"


def changes(
    before: Observation | None, now: Observation, told: Observation | None
) -> Iterator[Event]:
    """Verdict, findings and probes that have changed; nothing where nothing has.

    Args:
        before: the observation before.
        now: this one.
        told: the last one that had findings: a look that failed takes none of them back.
    """
    was, is_now = verdict_of(before) if before else None, verdict_of(now)
    if was != is_now:
        how = f"from {was} to {is_now}" if was else f"is {is_now}"
        fields = {"event": "verdict-changed", "verdict": is_now, "before": was or ""}
        yield Event(f"verdict {how}", _PRIORITY[is_now], fields)
    yield from _findings(told, now)
    yield from _probes(before, now)
    if _is_queued(now) and not _is_queued(before):
        yield Event("an automatic rebuild is queued", "notice", {"event": "rebuild-queued"})


def _is_queued(observation: Observation | None) -> bool:
    parts = observation.parts if observation is not None else ()
    return any(
        entry.value
        for part in parts
        for entry in part.samples
        if entry.name == "gpuguard_rebuild_queued"
    )


def _findings(told: Observation | None, now: Observation) -> Iterator[Event]:
    old = _by_key(told)
    new = _by_key(now)
    if not now.status:  # nobody could look: that is no reason to call anything gone
        return
    for key, finding in new.items():
        if key not in old:
            line = f"{finding['subject']}: {finding['message']} [{finding['code']}]"
            yield Event(line, _PRIORITY[finding["severity"]], _fields("finding", finding))
    for key, finding in old.items():
        if key not in new:
            line = f"{finding['subject']}: no longer: {finding['message']} [{finding['code']}]"
            yield Event(line, "notice", _fields("finding-gone", finding))


def _by_key(observation: Observation | None) -> dict[tuple[str, str], Mapping[str, Any]]:
    found = observation.status.get("findings", ()) if observation is not None else ()
    return {(finding["code"], finding["subject"]): finding for finding in found}


def _fields(event: str, finding: Mapping[str, Any]) -> dict[str, str]:
    known = {name: str(finding[name]) for name in ("code", "severity", "subject", "remedy")}
    return {"event": event, **known}


def _probes(before: Observation | None, now: Observation) -> Iterator[Event]:
    old = {part.probe: part.problem for part in before.parts} if before is not None else {}
    for part in now.parts:
        name, was = part.probe.value, old.get(part.probe)
        if part.problem is not None and was is None:
            fields = {"event": "probe-failed", "probe": name}
            yield Event(f"probe {name} fails: {part.problem}", "error", fields)
        elif part.problem is None and was is not None:
            fields = {"event": "probe-recovered", "probe": name}
            yield Event(f"probe {name} works again", "notice", fields)
