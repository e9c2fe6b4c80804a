"""Collect what the doctor needs, and let the core judge it: the use case behind ``doctor``."""

from __future__ import annotations

import re
from datetime import datetime

from gpuguard.accepted import read_accepted
from gpuguard.config import Config
from gpuguard.core.doctor import Diagnosis, diagnose
from gpuguard.core.doctor_facts import DoctorFacts, Unread
from gpuguard.core.facts import HostFacts
from gpuguard.errors import GpuguardError, ProbeError
from gpuguard.host import Host
from gpuguard.host.reading import read_text, real_path
from gpuguard.probes.cards_nvml import probe_nvml_cards
from gpuguard.probes.iommu import probe_iommu
from gpuguard.probes.kernel_log import probe_kernel_log
from gpuguard.probes.modprobe_options import probe_options
from gpuguard.probes.nodes import probe_loaded_modules, probe_missing_nodes
from gpuguard.probes.params import probe_information, probe_params
from gpuguard.probes.pci import probe_cards
from gpuguard.probes.serving_env import probe_serving
from gpuguard.probes.virt import probe_lockdown, probe_virt
from gpuguard.probes.vllm_cache import probe_vllm_caches
from gpuguard.verbs.inspect import look, policy_of

_BTIME = re.compile(r"^btime (\d+)$", re.MULTILINE)


def examine(host: Host, config: Config | None) -> Diagnosis:
    """Look at everything and judge it; nothing is changed.

    Raises:
        StateError: the accepted P2P state is there and cannot be read.
    """
    policy = policy_of(config, read_accepted(host))
    return diagnose(collect(host, config), policy)


def collect(host: Host, config: Config | None) -> DoctorFacts:
    """Every fact that the checks need; what cannot be read stands there as unread."""
    facts = _look(host, config)
    information = probe_information(host)
    nvml, nvml_problem = probe_nvml_cards(host)
    granted = () if isinstance(facts, Unread) else [g.pci_bus_id for g in facts.p2p.gpus]
    cards = probe_cards(host, probe_iommu(host), information, nvml, granted)
    units = probe_serving(host)
    caches, unread_caches = probe_vllm_caches(host, () if isinstance(units, Unread) else units)
    return DoctorFacts(
        host=facts,
        cards=cards,
        has_module_trees=_has_module_trees(host),
        nvml_problem=nvml_problem,
        excluded=frozenset(config.p2p.exclude if config is not None else ()),
        params=probe_params(host),
        options=probe_options(host),
        loaded_modules=probe_loaded_modules(host),
        missing_nodes=probe_missing_nodes(host, () if isinstance(cards, Unread) else cards),
        virt=probe_virt(host),
        log=probe_kernel_log(host),
        lockdown=probe_lockdown(host),
        units=units,
        caches=caches,
        unread_caches=unread_caches,
        booted=_boot_time(host),
        built=None if isinstance(facts, Unread) else _build_time(facts),
    )


def _look(host: Host, config: Config | None) -> HostFacts | Unread:
    try:
        return look(host, config)
    except GpuguardError as error:
        return Unread("the host's kernels and modules", error.message)


def _has_module_trees(host: Host) -> bool:
    try:
        return real_path(host, "/lib/modules") is not None
    except ProbeError:
        return True


def _boot_time(host: Host) -> float | None:
    try:
        match = _BTIME.search(read_text(host, "/proc/stat") or "")
    except ProbeError:
        return None
    return float(match[1]) if match else None


def _build_time(facts: HostFacts) -> float | None:
    """When the loaded module was built, if it is one of ours."""
    for kernel in facts.kernels:
        for record in kernel.records:
            ids = [build_id for _, build_id in record.build_ids]
            if facts.driver.loaded_build_id in ids and record.created:
                try:
                    return datetime.fromisoformat(record.created).timestamp()
                except ValueError:
                    return None
    return None
