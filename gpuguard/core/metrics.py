"""Every metric that gpuguard has: one table, from which exporter and docs/metrics.md are made.

Base units; a state is a value, never a changing label; counters start at 0. The metrics of a
probe are all there while it succeeds, and none of them while it fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Probe(StrEnum):
    """What can fail by itself; the value of the label ``probe``."""

    KERNEL = "kernel"
    DRIVER = "driver"
    TOPO = "topo"
    PCI = "pci"
    HOLDS = "holds"
    REBUILD = "rebuild"
    GATE = "gate"
    LANES = "lanes"
    TRANSFER = "transfer"
    COLLECTIVE = "collective"


#: Those of every observation; the others have series once ``verify --deep`` has run, or a lane was
#: switched.
REGULAR_PROBES = (
    Probe.KERNEL, Probe.DRIVER, Probe.TOPO, Probe.PCI, Probe.HOLDS, Probe.REBUILD, Probe.GATE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family; ``probe`` None: of gpuguard itself, always there."""

    name: str
    kind: str  # "gauge", "counter"
    help: str
    labels: tuple[str, ...] = ()
    probe: Probe | None = None
    values: str = ""  # for people: what label values and numbers mean


@dataclass(frozen=True, slots=True)
class Sample:
    """One series with its value; labels in the order of the metric's."""

    name: str
    labels: tuple[str, ...]
    value: float


_PAIR = ("src_uuid", "dst_uuid")
_NEVER = "0: never"
_FLAG = "1: yes, 0: no"

METRICS = (
    # --- gpuguard itself
    Metric("gpuguard_build_info", "gauge", "gpuguard itself; always 1.", ("version",)),
    Metric(
        "gpuguard_verdict", "gauge", "The host in one word, as gpuguard status says it.",
        ("verdict",), values="verdict: ok, warning, unknown, critical; 1 for the one that holds",
    ),
    Metric(
        "gpuguard_findings", "gauge", "What gpuguard status finds wrong.", ("severity",),
        values="severity: warning, unknown, critical",
    ),
    Metric(
        "gpuguard_observation_timestamp_seconds", "gauge",
        "When the host was observed last, well or not.",
    ),
    Metric(
        "gpuguard_observation_interval_seconds", "gauge",
        "How often the host is observed.", values="0: not by a daemon (textfile)",
    ),
    Metric(
        "gpuguard_probe_success", "gauge", "Whether a probe could look.", ("probe",),
        values=_FLAG,
    ),
    Metric(
        "gpuguard_probe_duration_seconds", "gauge", "How long the probe took last.", ("probe",)
    ),
    Metric(
        "gpuguard_probe_last_success_timestamp_seconds", "gauge",
        "When the probe could look last.", ("probe",), values=_NEVER,
    ),
    Metric(
        "gpuguard_config_last_reload_successful", "gauge",
        "Whether the configuration in force is the one on the disk.", values=_FLAG,
    ),
    Metric(
        "gpuguard_config_last_reload_success_timestamp_seconds", "gauge",
        "When a configuration was read successfully last.",
    ),
    # --- topo
    Metric(
        "gpuguard_gpu_info", "gauge", "A card that the driver sees; always 1.",
        ("uuid", "index", "name", "pci_bus_id"), Probe.TOPO,
    ),
    Metric("gpuguard_gpus", "gauge", "Cards that the driver sees.", (), Probe.TOPO),
    Metric(
        "gpuguard_gpus_expected", "gauge", "Cards that must be there.", (), Probe.TOPO,
        values="by configuration, else as accepted, else as on the PCI bus",
    ),
    Metric(
        "gpuguard_expectation_origin", "gauge", "Who says which cards must be there.",
        ("origin",), Probe.TOPO,
        "origin: configured, accepted, bus, none; 1 for one; bus and none: a card that leaves the "
        "PCI bus is not missed",
    ),
    Metric(
        "gpuguard_p2p_pair_ok", "gauge", "Whether the driver grants P2P on an ordered pair.",
        (*_PAIR, "capability"), Probe.TOPO, f"{_FLAG}; capability: read, write",
    ),
    Metric(
        "gpuguard_p2p_pair_status", "gauge", "The driver's word about an ordered pair.",
        (*_PAIR, "capability"), Probe.TOPO, "NVML's: 0 OK, 1 CNS, 2 GNS, 3 TNS, 4 DR, 5 NS, 6 U",
    ),
    Metric(
        "gpuguard_p2p_pairs", "gauge", "Expected ordered pairs that are granted.",
        ("capability",), Probe.TOPO,
    ),
    Metric(
        "gpuguard_p2p_pairs_expected", "gauge", "Ordered pairs that must be granted.",
        ("capability",), Probe.TOPO,
    ),
    Metric(
        "gpuguard_p2p_unavailable", "gauge",
        "Why the driver could not be asked; there whether it could or not.", ("reason",),
        values=f"{_FLAG}; every reason is always there",
    ),
    # --- pci
    Metric(
        "gpuguard_gpu_bar1_bytes", "gauge", "Size of a card's BAR1, through which peers reach it.",
        ("uuid",), Probe.PCI, "0: it has no address",
    ),
    Metric(
        "gpuguard_pci_acs_redirecting_bridges", "gauge",
        "Ports above the cards that send peer traffic up to the CPU.", (), Probe.PCI,
        "absent where root alone may read that: in the daemon; a textfile by root has it",
    ),
    Metric(
        "gpuguard_iommu_translating", "gauge",
        "Whether the IOMMU translates what a card sends.", (), Probe.PCI,
        f"{_FLAG}; absent where it cannot be read",
    ),
    # --- driver
    Metric(
        "gpuguard_module_info", "gauge", "The loaded module; always 1.",
        ("module", "version", "build_id", "signer"), Probe.DRIVER,
    ),
    Metric(
        "gpuguard_driver_info", "gauge", "Versions of loaded driver and userland; always 1.",
        ("loaded", "userland", "flavour"), Probe.DRIVER,
    ),
    # --- kernel; where="loaded" is of the probe driver
    Metric(
        "gpuguard_module_patched", "gauge", "Whether a module is one of our builds.",
        ("module", "kernel", "where"), Probe.KERNEL,
        f"{_FLAG}; where: loaded (probe driver), disk, initramfs; kernels: running and next",
    ),
    Metric(
        "gpuguard_module_shadowed", "gauge", "Whether another copy wins over our module.",
        ("module", "kernel"), Probe.KERNEL, _FLAG,
    ),
    Metric(
        "gpuguard_kernel_ready", "gauge", "Whether P2P would survive a boot into this kernel.",
        ("kernel", "role"), Probe.KERNEL, f"{_FLAG}; role: running, next",
    ),
    Metric(
        "gpuguard_kernel_build_failed", "gauge",
        "Whether the last build for an installed kernel failed, and it is not ready.",
        ("kernel",), Probe.KERNEL, _FLAG,
    ),
    Metric("gpuguard_kernels", "gauge", "Installed kernels.", ("ready",), Probe.KERNEL,
           "ready: true, false"),
    Metric(
        "gpuguard_reboot_required", "gauge", "Whether a reboot is due, by reason.", ("reason",),
        Probe.KERNEL, f"{_FLAG}; reason: kernel, modules, userland; all are always there",
    ),
    Metric(
        "gpuguard_reboot_safe", "gauge", "Whether a reboot would keep P2P.", (), Probe.KERNEL,
        _FLAG,
    ),
    # --- holds
    Metric(
        "gpuguard_package_held", "gauge", "Whether a package of the policy is on hold.",
        ("package",), Probe.HOLDS, _FLAG,
    ),
    Metric(
        "gpuguard_holds_active", "gauge", "Whether gpuguard holds packages here at all.", (),
        Probe.HOLDS, _FLAG,
    ),
    Metric(
        "gpuguard_holds_drifted", "gauge",
        "Packages that should be on hold and are not (policy minus reality).", (), Probe.HOLDS,
    ),
    Metric(
        "gpuguard_holds_ineffective", "gauge", "Holds that keep nothing back.", (), Probe.HOLDS
    ),
    Metric(
        "gpuguard_holds_foreign", "gauge", "Holds that gpuguard did not set.", (), Probe.HOLDS
    ),
    Metric(
        "gpuguard_hold_oldest_timestamp_seconds", "gauge", "Since when our oldest hold is set.",
        (), Probe.HOLDS, "absent where there is none",
    ),
    Metric(
        "gpuguard_withheld_upgrades", "gauge", "Upgrades that wait because of holds.",
        ("kind",), Probe.HOLDS, "kind: security, other; absent until somebody looked",
    ),
    Metric(
        "gpuguard_withheld_oldest_timestamp_seconds", "gauge",
        "Since when the oldest withheld upgrade waits.", ("kind",), Probe.HOLDS,
        "kind: security, other; absent where none waits",
    ),
    # --- rebuild
    Metric(
        "gpuguard_rebuilds_total", "counter", "Builds of modules that ended.", ("result",),
        Probe.REBUILD, "result: done, failed",
    ),
    Metric(
        "gpuguard_rebuild_duration_seconds", "gauge", "How long the last one took.",
        ("result",), Probe.REBUILD, "result: done, failed; 0: there was none",
    ),
    Metric(
        "gpuguard_rebuild_last_timestamp_seconds", "gauge", "When the last one ended.",
        ("result",), Probe.REBUILD, f"result: done, failed; {_NEVER}",
    ),
    Metric(
        "gpuguard_rebuild_queued", "gauge", "Whether an automatic run is wanted.", (),
        Probe.REBUILD, _FLAG,
    ),
    Metric(
        "gpuguard_automatic_run_last_timestamp_seconds", "gauge",
        "When the last automatic run ended.", (), Probe.REBUILD, _NEVER,
    ),
    Metric(
        "gpuguard_automatic_run_last_exit_status", "gauge",
        "How the last automatic run ended.", (), Probe.REBUILD,
        "its exit status; absent if there was none",
    ),
    # --- gate
    Metric(
        "gpuguard_gate_verdict", "gauge", "What the gate said since this boot.", ("verdict",),
        Probe.GATE, "verdict: ok, warning, unknown, critical; absent if it has not run",
    ),
    Metric(
        "gpuguard_gate_timestamp_seconds", "gauge", "When the gate looked last.", (),
        Probe.GATE, "absent if it has not run since this boot",
    ),
    # --- lanes: where a lane was ever switched
    Metric(
        "gpuguard_lane_info", "gauge", "The active lane; always 1.", ("lane", "lane_id"),
        Probe.LANES, "absent where none is active",
    ),
    Metric(
        "gpuguard_lane_active", "gauge", "Whether a lane is meant to serve.", (), Probe.LANES,
        f"{_FLAG}; absent where none ever was",
    ),
    Metric(
        "gpuguard_lane_ready", "gauge",
        "Whether the engine that the front leads to answers /health.", (), Probe.LANES,
        f"{_FLAG}; absent without a front",
    ),
    Metric(
        "gpuguard_lane_p2p_wanted", "gauge", "Whether the active lane wants P2P.", (),
        Probe.LANES, f"{_FLAG}; root and the daemon may read that: absent elsewhere",
    ),
    Metric(
        "gpuguard_lane_p2p_on", "gauge", "Whether the active lane was started with P2P.", (),
        Probe.LANES, f"{_FLAG}; absent until it was started since this boot",
    ),
    Metric(
        "gpuguard_lane_switching", "gauge",
        "Whether a switch of lanes is under way, or was interrupted.", (), Probe.LANES, _FLAG,
    ),
    Metric(
        "gpuguard_lane_switch_step", "gauge", "What that switch is at.", (), Probe.LANES,
        "0: no switch, 1 preflight, 2 snapshot, 3 drain, 4 stop, 5 start, 6 ready, 7 identity, "
        "8 gate, 9 promote, 10 undrain, 11 halt, 12 done",
    ),
    Metric(
        "gpuguard_lane_switch_started_timestamp_seconds", "gauge", "When that switch began.", (),
        Probe.LANES, "absent where there is none",
    ),
    Metric(
        "gpuguard_lane_last_switch_outcome", "gauge", "How the last switch ended.", ("outcome",),
        Probe.LANES,
        "outcome: promoted, refused, rolled-back, fell-back, failed; 1 for the one that holds",
    ),
    Metric(
        "gpuguard_lane_last_switch_timestamp_seconds", "gauge", "When the last switch ended.", (),
        Probe.LANES, _NEVER,
    ),
    Metric(
        "gpuguard_lane_switches_total", "counter", "Switches that ended.", ("outcome",),
        Probe.LANES,
        "outcome: promoted, refused, rolled-back, fell-back, failed; begins anew after a thousand",
    ),
    # --- transfer, collective: of the last gpuguard verify --deep
    Metric(
        "gpuguard_p2p_transfer_ok", "gauge", "Whether the bytes compared equal.",
        (*_PAIR, "operation", "engine"), Probe.TRANSFER,
        f"{_FLAG}; absent where none were compared; operation: read, write; engine: ce (copy "
        "engine), sm (kernel)",
    ),
    Metric(
        "gpuguard_p2p_transfers", "gauge", "Engines of ordered pairs, by what they have shown.",
        ("verdict",), Probe.TRANSFER,
        "verdict: ok, inconclusive, implausible, transfer_error, hang, wrong_data",
    ),
    Metric(
        "gpuguard_p2p_bandwidth_bytes_per_second", "gauge", "Measured: the fastest engine.",
        _PAIR, Probe.TRANSFER,
    ),
    Metric(
        "gpuguard_p2p_bandwidth_limit_bytes_per_second", "gauge",
        "What the link can carry at most.", _PAIR, Probe.TRANSFER, "absent where it is not known",
    ),
    Metric(
        "gpuguard_p2p_bandwidth_accepted_bytes_per_second", "gauge",
        "What was measured when the state was accepted.", _PAIR, Probe.TRANSFER,
        "absent where nothing was accepted",
    ),
    Metric(
        "gpuguard_p2p_latency_seconds", "gauge", "Measured: one load by a kernel.", _PAIR,
        Probe.TRANSFER,
    ),
    Metric(
        "gpuguard_p2p_collective_verdict", "gauge", "All-reduce with P2P on against off.",
        ("verdict",), Probe.COLLECTIVE,
        "verdict: healthy, hang, wrong_data, transfer_error, inconclusive; 1 for one",
    ),
    # --- textfile
    Metric(
        "gpuguard_textfile_last_run_timestamp_seconds", "gauge",
        "When gpuguard metrics --textfile wrote this file.", values="in textfiles only",
    ),
)  # fmt: skip

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def sample(name: str, value: float | bool, *labels: str) -> Sample:  # noqa: FBT001 - a flag is a value
    """A series of a metric that is in the table.

    Raises:
        ValueError: it has other labels.
    """
    if len(labels) != len(BY_NAME[name].labels):
        raise ValueError(f"{name} has the labels {BY_NAME[name].labels}, not {labels}")
    return Sample(name, labels, float(value))


def stateset(name: str, states: Iterable[str], current: str | None) -> tuple[Sample, ...]:
    """Every state, 1 for the current one."""
    return tuple(sample(name, state == current, state) for state in states)
