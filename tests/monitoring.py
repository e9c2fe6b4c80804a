"""What the tests of rules and dashboards share: the shipped files, and the tools they need."""

from __future__ import annotations

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
