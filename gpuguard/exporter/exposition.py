"""Series as text: Prometheus' format, and OpenMetrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from gpuguard.core.metrics import METRICS, Sample

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class _Families:
    """What prometheus_client calls a registry: something that can be collected from."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = tuple(samples)

    def collect(self) -> Iterator[Metric]:
        by_name: dict[str, list[Sample]] = {}
        for entry in self._samples:
            by_name.setdefault(entry.name, []).append(entry)
        for metric in METRICS:  # in the table's order
            if metric.name not in by_name:
                continue
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            made = family(metric.name, metric.help, labels=metric.labels)
            for entry in by_name[metric.name]:
                made.add_metric(entry.labels, entry.value)
            yield made


def prometheus_text(samples: Iterable[Sample]) -> bytes:
    """Prometheus' text format."""
    return bytes(generate_latest(_Families(samples)))


def openmetrics_text(samples: Iterable[Sample]) -> bytes:
    """OpenMetrics, with its end marker."""
    return bytes(generate_openmetrics(_Families(samples)))  # type: ignore[no-untyped-call]
