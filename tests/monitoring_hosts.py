"""Expositions with a series for everything that rules and dashboards can ask for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuguard.core.metrics import METRICS, Sample
from gpuguard.core.samples_deep import COLLECTIVE_VERDICTS, TRANSFER_VERDICTS
from gpuguard.core.samples_lanes import OUTCOMES
from gpuguard.exporter.exposition import prometheus_text
from tests.monitoring import vllm_metrics

KERNELS = ("6.1.0-57-amd64", "6.1.0-58-amd64")
_VALUES = {
    "capability": ("read", "write"), "verdict": ("ok", "warning", "unknown", "critical"),
    "severity": ("warning", "unknown", "critical"), "module": ("nvidia", "nvidia-uvm"),
    "where": ("loaded", "disk", "initramfs"), "kernel": KERNELS, "role": ("running", "next"),
    "result": ("done", "failed"), "kind": ("security", "other"), "engine": ("ce", "sm"),
    "operation": ("read", "write"), "ready": ("true", "false"),
    "probe": ("kernel", "driver", "topo", "pci", "holds", "rebuild", "gate", "lanes", "transfer"),
    "outcome": OUTCOMES,
}  # fmt: skip
#: States of which one holds, the good one first.
_STATES = {
    "gpuguard_lane_last_switch_outcome": OUTCOMES,
    "gpuguard_p2p_collective_verdict": COLLECTIVE_VERDICTS,
    "gpuguard_p2p_transfers": TRANSFER_VERDICTS,
}
#: (metric, value of a label): its number; everything else is 1, or 0 for what must not be.
_ZERO = (
    "gpuguard_module_shadowed", "gpuguard_reboot_required", "gpuguard_holds_drifted",
    "gpuguard_holds_ineffective", "gpuguard_holds_foreign", "gpuguard_rebuild_queued",
    "gpuguard_p2p_unavailable", "gpuguard_iommu_translating", "gpuguard_findings",
    "gpuguard_pci_acs_redirecting_bridges", "gpuguard_automatic_run_last_exit_status",
    "gpuguard_withheld_upgrades", "gpuguard_lane_switching", "gpuguard_lane_switch_step",
)  # fmt: skip


@dataclass
class EveryMetric:
    """A host with a series for every entry of the table; ``changed`` has other numbers."""

    number: int = 1
    cards: int = 2
    verdict: str = "ok"
    changed: dict[str, float] = field(default_factory=dict)

    def uuid(self, card: int) -> str:
        return f"GPU-{self.number:08x}-0000-4000-8000-{card:012x}"

    def text(self) -> str:
        """As the exporter would write it now."""
        return prometheus_text(list(self.samples())).decode()

    def samples(self) -> Iterator[Sample]:
        for metric in METRICS:
            for labels in self._labels(metric.name, metric.labels):
                yield Sample(metric.name, labels, self._number(metric.name, labels))

    def _number(self, name: str, labels: tuple[str, ...]) -> float:
        fixed: dict[str, float] = {
            "gpuguard_observation_interval_seconds": 60,
            "gpuguard_gpus": self.cards, "gpuguard_gpus_expected": self.cards,
            "gpuguard_p2p_pairs": self.cards * (self.cards - 1),
            "gpuguard_p2p_pairs_expected": self.cards * (self.cards - 1),
            "gpuguard_p2p_pair_status": 0, "gpuguard_gpu_bar1_bytes": 2**35,
            "gpuguard_p2p_bandwidth_bytes_per_second": 5.5e10,
            "gpuguard_p2p_bandwidth_limit_bytes_per_second": 6.3e10,
            "gpuguard_p2p_bandwidth_accepted_bytes_per_second": 5.5e10,
            **dict.fromkeys(_ZERO, 0), **self.changed,
        }  # fmt: skip
        if name in ("gpuguard_verdict", "gpuguard_gate_verdict"):
            return float(labels == (self.verdict,))
        if name in _STATES:
            return float(labels == (_STATES[name][0],))
        if name.startswith("gpuguard_rebuild") and labels == ("failed",):
            return fixed.get(f"{name} failed", 0)
        if "timestamp_seconds" in name:
            return fixed.get(name, time.time())
        return fixed.get(name, 1)

    def _labels(self, name: str, labels: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        cards = range(self.cards)
        if name == "gpuguard_gpu_info":
            yield from ((self.uuid(c), str(c), "RTX 5090", f"0000:{c + 1:02x}:00.0") for c in cards)
        elif name in _STATES:
            yield from ((verdict,) for verdict in _STATES[name])
        elif name == "gpuguard_kernel_ready":
            yield from zip(KERNELS, ("running", "next"), strict=True)
        else:
            yield from self._product(labels)

    def _product(self, labels: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if not labels:
            yield ()
        elif labels[:2] == ("src_uuid", "dst_uuid"):
            for src in range(self.cards):
                for dst in range(self.cards):
                    if src != dst:
                        ends = (self.uuid(src), self.uuid(dst))
                        yield from ((*ends, *rest) for rest in self._product(labels[2:]))
        else:
            own = tuple(self.uuid(card) for card in range(self.cards))
            values = own if labels[0] == "uuid" else _VALUES.get(labels[0], (f"a {labels[0]}",))
            for value in values:
                yield from ((value, *rest) for rest in self._product(labels[1:]))

    def dcgm(self) -> str:
        """What dcgm-exporter says of the first card."""
        labels = (
            f'{{gpu="0",UUID="{self.uuid(0)}",device="nvidia0",'
            'modelName="NVIDIA GeForce RTX 5090",Hostname="rig"}'
        )
        numbers = {"GPU_TEMP": 61, "GPU_UTIL": 87, "POWER_USAGE": 410.5, "FB_USED": 1024}
        return "".join(f"DCGM_FI_DEV_{n}{labels} {v}\n" for n, v in numbers.items())


@dataclass
class Vllm:
    """The metrics of a real vLLM, with numbers that a test chooses; it answers all the time."""

    numbers: dict[str, float] = field(default_factory=dict)
    scrapes: int = 0

    def text(self) -> str:
        self.scrapes += 1
        return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for name, (kind, labels) in vllm_metrics().items():
            if not name.startswith("vllm:"):
                continue
            given = dict.fromkeys(sorted(labels - {"-"}), "0") | {"engine": "0"}
            if "model_name" in labels:
                given["model_name"] = "qwen"
            if "finished_reason" in labels:
                given["finished_reason"] = "stop"
            yield f"# TYPE {name.removesuffix('_total')} {kind}\n" if kind != "counter" else ""
            if kind == "histogram":
                yield from self._histogram(name, given)
            else:
                rising = 10.0 * self.scrapes if kind == "counter" else 0.0
                is_info = name.endswith("_info")
                number = self.numbers.get(name, 1.0 if is_info else rising)
                yield f"{name}{_braces(given)} {number}\n"

    def _histogram(self, name: str, labels: dict[str, str]) -> Iterator[str]:
        count = 10 * self.scrapes
        for bound, share in (("0.1", 0.5), ("1.0", 0.9), ("+Inf", 1.0)):
            yield f"{name}_bucket{_braces({**labels, 'le': bound})} {int(count * share)}\n"
        yield f"{name}_count{_braces(labels)} {count}\n{name}_sum{_braces(labels)} {count}\n"


def _braces(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
