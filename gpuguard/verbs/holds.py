"""Hold, lift, hold again: the use cases behind ``hold``, ``unhold``, windows, automatic runs.

The caller holds gpuguard's lock. The ledger is written before dpkg is told and after it was
asked what it took, so a crash ends in "held again at the next automatic run".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuguard.apply.holds import HOLD, released, set_selections
from gpuguard.config import Config
from gpuguard.core.hold_plan import HoldPlan, plan_again, plan_hold, plan_lift, plan_unhold
from gpuguard.core.holds import HoldFacts, HoldPolicy
from gpuguard.errors import GpuguardError
from gpuguard.host import Host
from gpuguard.ledger import read_ledger, write_ledger
from gpuguard.probes.dpkg import read_packages
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
