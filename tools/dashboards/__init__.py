"""Grafana's dashboards as code: ``python -m tools.dashboards`` writes the JSON that is shipped.

The JSON is long and repeats itself; here a panel is a title, what it shows, and its queries.
tests/test_dashboards.py fails if the two differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tools.dashboards.build import Dashboard
from tools.dashboards.fleet import FLEET
from tools.dashboards.host import HOST
from tools.dashboards.vllm import VLLM

FOLDER = Path(__file__).parents[2] / "gpuguard/resources/grafana/dashboards"
DASHBOARDS: tuple[Dashboard, ...] = (FLEET, HOST, VLLM)


def rendered() -> Iterator[tuple[Path, str]]:
    """Every file and its content."""
    for dashboard in DASHBOARDS:
        text = json.dumps(dashboard.to_json(), indent=1, ensure_ascii=False)
        yield FOLDER / f"{dashboard.uid}.json", f"{text}\n"
