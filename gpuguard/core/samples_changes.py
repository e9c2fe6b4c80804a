"""What is held, rebuilt and proven, as series."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from gpuguard.core.findings import Verdict
from gpuguard.core.holds import HoldState, Ledger, Withheld
from gpuguard.core.metrics import Sample, sample, stateset
from gpuguard.core.tally import Tally

_KINDS = {"security": True, "other": False}


def timestamp(text: str) -> float:
    """Seconds since the epoch of an RFC 3339 time.

    Raises:
        ValueError: it is none.
    """
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def hold_samples(state: HoldState, book: Ledger) -> Iterator[Sample]:
    """The policy against reality, and what holding costs."""
    meant = sorted({*state.wanted, *book.packages}) if state.active else ()
    for name in meant:
        yield sample("gpuguard_package_held", name in state.held, name)
    yield sample("gpuguard_holds_active", state.active)
    yield sample("gpuguard_holds_drifted", len({*state.drifted, *state.missing}))
    yield sample("gpuguard_holds_ineffective", len(state.ineffective))
    yield sample("gpuguard_holds_foreign", len(state.foreign))
    since = [timestamp(book.packages[name].since) for name in state.ours]
    if since:
        yield sample("gpuguard_hold_oldest_timestamp_seconds", min(since))
    if state.withheld is not None:
        yield from _withheld_samples(state.withheld)


def _withheld_samples(withheld: Iterable[Withheld]) -> Iterator[Sample]:
    listed = tuple(withheld)
    for kind, security in _KINDS.items():
        found = [upgrade for upgrade in listed if upgrade.security is security]
        yield sample("gpuguard_withheld_upgrades", len(found), kind)
        times = [(u.security_since if security else None) or u.since for u in found]
        known = [timestamp(time) for time in times if time]
        if known:
            yield sample("gpuguard_withheld_oldest_timestamp_seconds", min(known), kind)


def rebuild_samples(
    tallies: Mapping[str, Tally], *, queued: bool, last_run: tuple[str, int] | None
) -> Iterator[Sample]:
    """History.

    Args:
        tallies: by result.
        queued: an automatic run is wanted.
        last_run: when the last automatic run ended, and its exit status.
    """
    for result, tally in tallies.items():
        yield sample("gpuguard_rebuilds_total", tally.count, result)
        yield sample("gpuguard_rebuild_duration_seconds", tally.seconds, result)
        yield sample("gpuguard_rebuild_last_timestamp_seconds", tally.last, result)
    yield sample("gpuguard_rebuild_queued", queued)
    ended = timestamp(last_run[0]) if last_run else 0
    yield sample("gpuguard_automatic_run_last_timestamp_seconds", ended)
    if last_run is not None:
        yield sample("gpuguard_automatic_run_last_exit_status", last_run[1])


def gate_samples(verdict: str, created: str) -> Iterator[Sample]:
    """What the gate said."""
    yield from stateset("gpuguard_gate_verdict", tuple(Verdict), verdict)
    yield sample("gpuguard_gate_timestamp_seconds", timestamp(created))
