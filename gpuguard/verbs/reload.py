"""Swap the loaded modules without a reboot: the use case behind ``reload``."""

from __future__ import annotations

from gpuguard.accepted import read_accepted
from gpuguard.apply.reload import Report, swap
from gpuguard.config import Config
from gpuguard.core.assess import Assessment, assess
from gpuguard.core.facts import HostFacts
from gpuguard.core.reload import Refusal, ReloadFacts, ReloadPlan, plan_reload
from gpuguard.errors import GpuguardError, LockHeldError, PreflightError
from gpuguard.host import Host
from gpuguard.probes.cards_nvml import probe_nvml_cards
from gpuguard.probes.holders import modules_disabled, probe_holders, probe_loaded
from gpuguard.verbs.inspect import look, policy_of


def decide(host: Host, config: Config | None) -> tuple[ReloadFacts, ReloadPlan]:
    """Look, and decide what a reload would do.

    Raises:
        ProbeError, StateError: what is loaded, or ours, cannot be told.
    """
    facts = collect(host, config)
    return facts, plan_reload(facts)


def collect(host: Host, config: Config | None) -> ReloadFacts:
    """Loaded modules, those on disk, and who holds the cards."""
    facts = look(host, config, with_p2p=False)
    # NVML first: its child is then gone when the descriptors are read
    cards, _ = probe_nvml_cards(host)
    processes = {pid for card in cards.values() for pid in card.processes}
    return ReloadFacts(
        release=facts.running,
        kernel=next((k for k in facts.kernels if k.release == facts.running), None),
        driver=facts.driver,
        secure_boot=facts.secure_boot,
        loaded=probe_loaded(host),
        holders=probe_holders(host, processes),
        modules_disabled=modules_disabled(host),
    )


def carry_out(host: Host, config: Config | None, plan: ReloadPlan, report: Report) -> Assessment:
    """Swap, then look at the host again; the caller holds the lock and the plan has no refusal.

    Raises:
        VerifyError, RollbackError: see ``apply.reload.swap``.
    """
    swap(host, plan, report)
    facts: HostFacts = look(host, config)
    return assess(facts, policy_of(config, read_accepted(host)))


def refused(refusal: Refusal, facts: ReloadFacts) -> GpuguardError:
    """The error that a refusal becomes; those who hold the cards are its detail."""
    lines = [
        f"{h.pid} {h.name}{f' ({h.unit})' if h.unit else ''}: {', '.join(h.devices)}"
        for h in facts.holders
    ]
    kind = LockHeldError if refusal.is_busy else PreflightError
    return kind(
        refusal.message,
        code=refusal.code,
        hint=refusal.hint,
        detail="\n".join(lines if refusal.is_busy else ()),
    )
