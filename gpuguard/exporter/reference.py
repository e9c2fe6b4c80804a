"""docs/metrics.md, made from the table of metrics."""

from __future__ import annotations

from collections.abc import Iterator

from gpuguard.core.metrics import METRICS, Metric, Probe

_HEAD = """\
# Metrics

<!-- Made from gpuguard/core/metrics.py by `make docs`; do not edit. -->

`gpuguard serve` has them at `/metrics` (Prometheus' text format, and OpenMetrics for those who ask
for it), by default on `127.0.0.1:9838`; `gpuguard metrics` prints them once, and
`gpuguard metrics --textfile` writes them for node_exporter. A scrape looks at nothing: it gets what
the last observation found.

- A state is a value, never a changing label; every expected pair of cards is always there, a bad
  one as 0. `gpuguard_p2p_pairs < gpuguard_p2p_pairs_expected` sees a lost card, too.
- While a probe fails its metrics are gone, and `gpuguard_probe_success` is 0: nothing old is
  repeated as fresh. `gpuguard_probe_last_success_timestamp_seconds` says since when.
- Cards are known by UUID as NVML prints it (`GPU-…`); `gpuguard_gpu_info` has index, name and PCI
  bus id. No label names the host: the scrape adds `instance`.
- With 8 cards there are some 330 series; a `gpuguard verify --deep` of all cards adds up to 6 for
  each ordered pair, and 5; lanes add 19.
"""
_SECTIONS: tuple[tuple[Probe | None, str, str], ...] = (
    (None, "gpuguard itself", "Always there."),
    (Probe.TOPO, "Probe `topo`", "What the driver grants between the cards: NVML, or nvidia-smi."),
    (Probe.PCI, "Probe `pci`", "What slows P2P down, or breaks it: `gpuguard doctor` tells more."),
    (Probe.DRIVER, "Probe `driver`", "What is loaded."),
    (Probe.KERNEL, "Probe `kernel`", "What the next boots would load."),
    (Probe.HOLDS, "Probe `holds`", "Which packages are on hold, and what that costs."),
    (Probe.REBUILD, "Probe `rebuild`", "What was built. Counters survive a restart."),
    (Probe.GATE, "Probe `gate`", "`gpuguard verify --gate`, after each boot."),
    (
        Probe.LANES,
        "Probe `lanes`",
        "Which vLLM lane serves, and its switches; absent where none was ever made.",
    ),
    (
        Probe.TRANSFER,
        "Probe `transfer`",
        "The last `gpuguard verify --deep` of all cards, however old it is; absent before.",
    ),
    (Probe.COLLECTIVE, "Probe `collective`", "Likewise: its all-reduce."),
)


def reference() -> str:
    """The page."""
    return "\n".join((_HEAD, *_parts()))


def _parts() -> Iterator[str]:
    for probe, title, text in _SECTIONS:
        yield f"## {title}\n\n{text}\n"
        yield "| metric | type | labels | meaning |\n| --- | --- | --- | --- |"
        yield from (_row(metric) for metric in METRICS if metric.probe is probe)
        yield ""


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
    meaning = metric.help.rstrip(".") + (f" ({metric.values})" if metric.values else "")
    return f"| `{metric.name}` | {metric.kind} | {labels} | {meaning} |"
