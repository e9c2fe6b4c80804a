"""Records for the few kinds of panels that we use, and the JSON that Grafana wants for them.

The JSON is that of Grafana's classic dashboards (schemaVersion 41, Grafana 11.6; older ones
from 10.1 on ignore what they do not know). No datasource is named: a variable chooses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24  # of Grafana's grid


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL; ``legend`` is a template of labels. ``now``: one value instead of a history."""

    expr: str
    legend: str = ""
    now: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """What a number stands for."""

    value: int
    text: str
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; ``steps`` are (from, colour), the first from anywhere."""

    kind: str
    title: str
    description: str
    queries: Sequence[Query]
    width: int = 6
    height: int = 4
    unit: str = "none"
    steps: Sequence[tuple[float | None, str]] = ((None, "text"),)
    states: Sequence[State] = ()
    no_value: str = "no data"
    options: Mapping[str, Any] = field(default_factory=dict)
    custom: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[Json] = ()
    transformations: Sequence[Json] = ()
    links: Sequence[Json] = ()
    minimum: float | None = None

    def to_json(self, number: int, x: int, y: int) -> Json:
        """The panel at a place of the grid."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "datasource": DATASOURCE,
            "targets": [
                _target(query, chr(ord("A") + i), table=self.kind == "table")
                for i, query in enumerate(self.queries)
            ],
            "transformations": list(self.transformations),
            "fieldConfig": {"defaults": self._defaults(), "overrides": list(self.overrides)},
            "options": dict(self.options),
        }

    def _defaults(self) -> Json:
        one_colour = self.kind == "timeseries"
        defaults: Json = {
            "unit": self.unit,
            "color": {"mode": "palette-classic" if one_colour else "thresholds"},
            "mappings": [state_mapping(self.states)] if self.states else [],
            "thresholds": {
                "mode": "absolute",
                "steps": [{"value": value, "color": colour} for value, colour in self.steps],
            },
            "noValue": self.no_value,
            "links": list(self.links),
            "custom": dict(self.custom),
        }
        return defaults if self.minimum is None else {**defaults, "min": self.minimum}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Rows of panels; each row is its title and its panels, which wrap at the grid's width."""

    uid: str
    title: str
    description: str
    variables: Sequence[Json]
    rows: Sequence[tuple[str, Sequence[Panel]]]
    links: Sequence[Json] = ()
    since: str = "now-24h"

    def to_json(self) -> Json:
        """The whole dashboard, without anything that changes from one rendering to the next."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["gpuguard"],
            "timezone": "browser",
            "editable": True,
            "graphTooltip": 1,
            "time": {"from": self.since, "to": "now"},
            "refresh": "1m",
            "schemaVersion": 41,
            "templating": {"list": [DATASOURCE_VARIABLE, *self.variables]},
            "annotations": {"list": []},
            "links": list(self.links),
            "panels": list(self._panels()),
        }

    def _panels(self) -> Iterator[Json]:
        number = y = 0
        for title, panels in self.rows:
            number += 1
            place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
            yield {"id": number, "type": "row", "title": title, "collapsed": False,
                   "gridPos": place, "panels": []}  # fmt: skip
            y, x, tallest = y + 1, 0, 0
            for panel in panels:
                if x + panel.width > WIDTH:
                    y, x, tallest = y + tallest, 0, 0
                number += 1
                yield panel.to_json(number, x, y)
                x, tallest = x + panel.width, max(tallest, panel.height)
            y += tallest


DATASOURCE_VARIABLE: Json = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
    "hide": 0,
    "refresh": 1,
    "regex": "",
    "includeAll": False,
    "multi": False,
    "options": [],
}


def label_variable(
    name: str, label: str, series: str, description: str, *, several: bool = False
) -> Json:
    """A choice among the values that a label has in some series."""
    query = f"label_values({series}, {name})"
    return {
        "name": name,
        "label": label,
        "description": description,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "variable"},
        "hide": 0,
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "includeAll": several,
        "multi": several,
        "options": [],
        **({"allValue": ".*"} if several else {}),
    }


def link_to(uid: str, title: str, variables: str = "") -> Json:
    """A link at the top, to another of our dashboards."""
    return {
        "title": title,
        "type": "link",
        "icon": "dashboard",
        "tooltip": title,
        "url": f"/d/{uid}{variables}",
        "tags": [],
        "asDropdown": False,
        "targetBlank": False,
        "includeVars": False,
        "keepTime": True,
    }


def state_mapping(states: Sequence[State]) -> Json:
    """Numbers as words with colours."""
    return {
        "type": "value",
        "options": {
            str(state.value): {"text": state.text, "color": state.colour, "index": index}
            for index, state in enumerate(states)
        },
    }


def override(name: str, **properties: Any) -> Json:
    """Properties of one column or series; ``custom__width`` stands for ``custom.width``."""
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [
            {"id": key.replace("__", "."), "value": value} for key, value in properties.items()
        ],
    }


def _target(query: Query, letter: str, *, table: bool) -> Json:
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "format": "table" if table else "time_series",
        "instant": query.now or table,
        "range": not (query.now or table),
    }
