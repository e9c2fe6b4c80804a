"""Hold, lift, hold again: the use cases behind ``hold``, ``unhold``, windows, automatic runs.

The caller holds gpuguard's lock. The ledger is written before dpkg is told and after it was
asked what it took, so a crash ends in "held again at the next automatic run".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuguard.apply.holds import HOLD, released, set_selections
from gpuguard.apply.lock import is_held
from gpuguard.config import Config
from gpuguard.core.findings import Finding
from gpuguard.core.hold_findings import hold_findings, withheld_findings
from gpuguard.core.hold_plan import HoldPlan, plan_again, plan_hold, plan_lift, plan_unhold
from gpuguard.core.holds import HoldFacts, HoldPolicy, HoldState, WithheldRecord, hold_state
from gpuguard.core.packages import Package
from gpuguard.core.withheld import dated, known_since
from gpuguard.errors import GpuguardError, ProbeError
from gpuguard.host import Host
from gpuguard.ledger import read_ledger, read_withheld, write_ledger, write_withheld
from gpuguard.probes.dpkg import read_packages
from gpuguard.probes.holds import probe_holds
from gpuguard.probes.withheld import lists_updated, probe_withheld
from gpuguard.verbs.clock import now

_LOCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldChange:
    """What was changed. ``restored``: those of ``held`` that had lost a hold of ours."""

    held: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def hold_policy(config: Config | None) -> HoldPolicy:
    """The operator's intent about holds; without a configuration the defaults."""
    if config is None:
        return HoldPolicy()
    holds = config.holds
    return HoldPolicy(packages=holds.packages, exclude=holds.exclude, enforce=holds.enforce)


def hold(host: Host, config: Config | None, names: Sequence[str] | None = None) -> HoldChange:
    """Hold what the policy means, now and from now on; with names: these besides.

    Raises:
        UsageError: a name is not installed. StateError: the ledger cannot be used.
        LockHeldError, CommandError, VerifyError: see ``apply.holds.set_selections``.
    """
    plan = plan_hold(_facts(host), hold_policy(config), names, now())
    return _carry_out(host, plan, _timeout(config))


def unhold(
    host: Host, names: Sequence[str] | None = None, *, timeout: float = _LOCK_SECONDS
) -> HoldChange:
    """Lift all holds that are ours and stop holding; with names: these, if they are ours.

    Raises:
        UsageError: a name is not held, or not by gpuguard; nothing was changed.
        StateError, LockHeldError, CommandError, VerifyError: as ``hold`` does.
    """
    return _carry_out(host, plan_unhold(_facts(host), names), timeout)


def lift_for_window(host: Host, *, timeout: float = _LOCK_SECONDS) -> tuple[str, ...]:
    """Lift all holds that are ours, for a while; returns their names. ``hold_again`` ends it.

    Raises:
        StateError, LockHeldError, CommandError, VerifyError: as ``hold`` does.
    """
    return _carry_out(host, plan_lift(_facts(host)), timeout).released


def hold_again(host: Host, config: Config | None) -> HoldChange:
    """Hold what a window or a crash lifted; if enforced, also what lost or lacks its hold.

    Once more changes nothing more. New kernels that came in a window are held like the old ones.

    Raises:
        StateError, LockHeldError, CommandError, VerifyError: as ``hold`` does.
    """
    plan = plan_again(_facts(host), hold_policy(config), now())
    return _carry_out(host, plan, _timeout(config))


def note_withheld(host: Host) -> WithheldRecord:
    """Look what the holds keep away, and since when; kept for those who only look (``status``).

    One call of apt, no network. That apt could not be asked is kept, too, and then what was
    known before stays.

    Raises:
        StateError, ProbeError: our own record, or dpkg's, cannot be read or written.
    """
    before = read_withheld(host)
    record = look_at_withheld(host, read_packages(host), before)
    moment = record.looked
    seen = before.packages if record.problem and before is not None else record.packages
    record = replace(record, packages=dated(seen, before, moment))
    if record != before:
        write_withheld(host, record)
    return record


def look_at_withheld(
    host: Host, packages: Mapping[str, Package], before: WithheldRecord | None
) -> WithheldRecord:
    """What apt says now, with the times that an earlier record has; writes nothing."""
    updated = lists_updated(host)
    try:
        found = known_since(probe_withheld(host, packages), before)
    except ProbeError as error:
        return WithheldRecord(looked=now(), lists_updated=updated, problem=error.message)
    return WithheldRecord(looked=now(), packages=found, lists_updated=updated)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsReport:
    """Everything that ``gpuguard holds`` shows; ``withheld`` is what apt says now."""

    facts: HoldFacts
    state: HoldState
    findings: tuple[Finding, ...]
    withheld: WithheldRecord


def report_holds(host: Host, config: Config | None) -> HoldsReport:
    """Look at the holds and at what they cost; changes nothing, needs no root."""
    policy = hold_policy(config)
    facts = replace(probe_holds(host), at_work=is_held(host))
    record = WithheldRecord(looked=now(), problem=facts.problem)
    if facts.problem is None:
        record = look_at_withheld(host, facts.packages, facts.withheld)
        facts = replace(facts, withheld=record)
    state = hold_state(facts, policy)
    findings = hold_findings(facts, state, enforced=policy.enforce)
    return HoldsReport(
        facts=facts, state=state, findings=(*findings, *withheld_findings(record)), withheld=record
    )


def preview(
    host: Host, config: Config | None, names: Sequence[str] | None, *, lift: bool = False
) -> HoldPlan:
    """What ``hold``, or with ``lift`` ``unhold``, would change; raises as they do."""
    facts = _facts(host)
    if lift:
        return plan_unhold(facts, names)
    return plan_hold(facts, hold_policy(config), names, now())


def _facts(host: Host) -> HoldFacts:
    return HoldFacts(packages=read_packages(host), ledger=read_ledger(host))


def _timeout(config: Config | None) -> float:
    return config.lock_timeout_seconds if config is not None else _LOCK_SECONDS


def _carry_out(host: Host, plan: HoldPlan, timeout: float) -> HoldChange:
    if plan.is_empty:
        return HoldChange(foreign=plan.foreign)
    packages = read_packages(host)
    wanted = {
        **dict.fromkeys(plan.hold, HOLD),
        **{name: released(packages[name]) for name in plan.release if name in packages},
    }
    if wanted:
        write_ledger(host, plan.during)
        try:
            set_selections(host, wanted, timeout=timeout)
        except GpuguardError:
            if {n: packages[n].selection for n in wanted} == _selections(host, wanted):
                write_ledger(host, plan.before)  # dpkg changed nothing: neither did we
            raise
    write_ledger(host, plan.after)
    return HoldChange(
        held=plan.hold, released=plan.release, restored=plan.restored, foreign=plan.foreign
    )


def _selections(host: Host, names: Sequence[str] | dict[str, str]) -> dict[str, str]:
    packages = read_packages(host)
    return {name: packages[name].selection for name in names if name in packages}
