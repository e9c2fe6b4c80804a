"""What the tests of rules and dashboards share: the shipped files, and the tools they need."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuguard.core.metrics import BY_NAME, Probe

REPOSITORY = Path(__file__).parents[1]
PROMETHEUS = REPOSITORY / "gpuguard/resources/prometheus"
GRAFANA = REPOSITORY / "gpuguard/resources/grafana"
ALERT_RULES = PROMETHEUS / "gpuguard-alerts.rules.yml"
RECORDING_RULES = PROMETHEUS / "gpuguard-recording.rules.yml"
CASES = REPOSITORY / "tests/promtool"
PACKAGES = {
    "promtool": "prometheus",
    "prometheus": "prometheus",
    "amtool": "prometheus-alertmanager",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "prometheus-node-exporter": "prometheus-node-exporter",
}
#: A selector: a metric's name with what stands in its braces.
_SELECTOR = re.compile(
    r"(?<![\w:\"'/.-])((?:gpuguard_|vllm:|instance:gpuguard_|gpuguard:)[a-zA-Z0-9_:]+)"
    r"(?:\{([^}]*)\})?"
)
_MATCHER = re.compile(r"(\w+)\s*(=~|!~|!=|=)\s*\"([^\"]*)\"")


def tool(name: str) -> str:
    """A program's path; skips the test if it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: apt-get install {PACKAGES[name]}")
    return path


def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    """A tool's answer, whatever it is."""
    return subprocess.run(
        [tool(str(argv[0])), *map(str, argv[1:])], capture_output=True, text=True, check=False
    )


@dataclass(frozen=True)
class Selector:
    """What a query asks for: ``matchers`` are (label, operator, value)."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expr: str) -> Iterator[Selector]:
    """Those of our metrics, of vLLM's and of our recording rules."""
    for name, inside in _SELECTOR.findall(expr):
        yield Selector(name, tuple(_MATCHER.findall(inside)))


@cache
def rules(file: Path) -> tuple[dict[str, Any], ...]:
    """Every rule of a file, in order."""
    document = yaml.safe_load(file.read_text())
    return tuple(rule for group in document["groups"] for rule in group["rules"])


def alerts() -> tuple[dict[str, Any], ...]:
    """Every alert."""
    return rules(ALERT_RULES)


def title(rule: dict[str, Any]) -> str:
    """Name and severity: two alerts may share a name."""
    return f"{rule['alert']}-{rule['labels']['severity']}"


# --- dashboards ----------------------------------------------------------------------------

DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))


def panels(file: Path) -> list[dict[str, Any]]:
    """Every panel that shows something, rows left out."""
    document = json.loads(file.read_text())
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def queries(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Every query with its panel."""
    for panel in panels(file):
        yield from ((panel, target["expr"]) for target in panel["targets"])


def filled(expr: str, instance: str = ".*", model: str = ".*") -> str:
    """A query as Grafana sends it: with values for the variables."""
    values = {"$instance": instance, "$model_name": model, "$__rate_interval": "1m"}
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert not re.search(r"\$[a-z_{]", expr), expr
    return expr


def vllm_metrics() -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> type and labels, of a real vLLM."""
    rows = (REPOSITORY / "tests/golden/vllm-0.32.0-metrics.txt").read_text().splitlines()
    split = (row.split() for row in rows)
    return {name: (kind, frozenset(labels.split(","))) for name, kind, labels in split}


def problems_of(selector: Selector) -> Iterator[str]:
    """What no exporter has: the metric, a label, a value of a label."""
    labels = _labels(selector.name)
    if labels is None:
        yield f"{selector.name}: no such metric"
        return
    for label, _, value in selector.matchers:
        if label not in labels | {"instance", "job"}:
            yield f"{selector.name}: no label {label}"
        words = _words(selector.name, label)
        yield from (
            f"{selector.name}: {label} is never {word}"
            for word in value.split("|")
            if words and word not in words
        )


def _words(name: str, label: str) -> set[str]:
    """The values that a label of ours can have; empty if the table does not tell."""
    if label == "probe":
        return {*Probe}
    said = BY_NAME[name].values if name in BY_NAME else ""
    return (
        set(re.findall(r"[\w-]+", said.split(f"{label}:", 1)[1])) if f"{label}:" in said else set()
    )


def _labels(name: str) -> frozenset[str] | None:
    if name in BY_NAME:
        return frozenset(BY_NAME[name].labels)
    if any(rule["record"] == name for rule in rules(RECORDING_RULES)):
        return frozenset({"verdict", "uuid", "index", "name", "pci_bus_id"})
    known = vllm_metrics()
    base = re.sub(r"_(bucket|count|sum)$", "", name)
    if name not in known and known.get(base, ("",))[0] == "histogram":
        name = base
    return known[name][1] if name in known else None
