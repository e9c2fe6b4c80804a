"""The kinds of panels, with the options that all of a kind share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.dashboards.build import Json, Panel, Query, State, override, state_mapping

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "text"

#: ``instance:gpuguard_verdict:code``
VERDICTS = (
    State(0, "ok", GREEN),
    State(1, "warning", YELLOW),
    State(2, "critical", RED),
    State(3, "unknown", ORANGE),
    State(4, "unreachable", "purple"),
)
#: NVML's P2P status
P2P_STATUS = (
    State(0, "OK", GREEN),
    State(1, "CNS", RED),
    State(2, "GNS", RED),
    State(3, "TNS", RED),
    State(4, "DR", ORANGE),
    State(5, "NS", RED),
    State(6, "U", ORANGE),
)
NONE_IS_FINE = ((None, GREEN), (1, RED))
NONE_IS_BETTER = ((None, GREEN), (1, YELLOW))
ONE_IS_FINE = ((None, RED), (1, GREEN))


def yes_no(yes: str, no: str) -> tuple[State, State]:
    """1 and 0 in words, where 1 is fine."""
    return State(1, yes, GREEN), State(0, no, RED)


def no_yes(yes: str, no: str) -> tuple[State, State]:
    """1 and 0 in words, where 0 is fine."""
    return State(1, yes, ORANGE), State(0, no, GREEN)


def stat(title: str, description: str, *queries: Query, show: str = "auto", **more: Any) -> Panel:
    """A number, large, in the colour of its threshold or state; ``show``: "name" for its label."""
    options = {
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": show,
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return Panel(kind="stat", title=title, description=description,
                 queries=queries, options=options, **more)  # fmt: skip


def graph(title: str, description: str, *queries: Query, **more: Any) -> Panel:
    """Lines over time."""
    custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "never",
              "spanNulls": False, "thresholdsStyle": {"mode": "off"}}  # fmt: skip
    custom.update(more.pop("custom", {}))
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return Panel(kind="timeseries", title=title, description=description, queries=queries,
                 options=options, custom=custom, **{"width": 12, "height": 8, **more})  # fmt: skip


def timeline(title: str, description: str, *queries: Query, **more: Any) -> Panel:
    """States over time, one bar a series."""
    options = {
        "mergeValues": True,
        "showValue": "auto",
        "alignValue": "left",
        "rowHeight": 0.8,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return Panel(kind="state-timeline", title=title, description=description, queries=queries,
                 options=options, custom={"lineWidth": 0, "fillOpacity": 80},
                 **{"width": 12, "height": 8, **more})  # fmt: skip


def table(title: str, description: str, *queries: Query, **more: Any) -> Panel:
    """Rows and columns; the colour of a cell is that of its state or threshold."""
    options = {"showHeader": True, "cellHeight": "sm"}
    custom = {"align": "auto", "filterable": False, "cellOptions": {"type": "auto"}}
    custom.update(more.pop("custom", {}))
    return Panel(kind="table", title=title, description=description, queries=queries,
                 options=options, custom=custom, **{"width": 12, "height": 8, **more})  # fmt: skip


def matrix(title: str, description: str, value: str, **more: Any) -> Panel:
    """From (rows) to (columns); ``value`` is a series with src_uuid and dst_uuid."""
    names = f"group_left (from) {_card('src_uuid', 'from')}"
    expr = f"{value} * on (instance, src_uuid) {names}"
    expr = f"{expr} * on (instance, dst_uuid) group_left (to) {_card('dst_uuid', 'to')}"
    return table(
        title,
        description,
        Query(expr),
        custom={"align": "center", "cellOptions": {"type": "color-background", "mode": "basic"}},
        transformations=[
            {
                "id": "groupingToMatrix",
                "options": {
                    "columnField": "to",
                    "rowField": "from",
                    "valueField": "Value",
                    "emptyValue": "null",
                },
            }
        ],
        overrides=[
            {
                "matcher": {"id": "byName", "options": "from\\to"},
                "properties": [
                    {"id": "custom.cellOptions", "value": {"type": "auto"}},
                    {"id": "custom.align", "value": "left"},
                ],
            }
        ],
        **more,
    )


def _card(key: str, label: str) -> str:
    named = f'label_replace(gpuguard_gpu_info, "{key}", "$1", "uuid", "(.+)")'
    return f'label_replace({named}, "{label}", "GPU$1", "index", "(.+)")'


def merged(names: Mapping[str, str], hidden: Sequence[str] = ()) -> list[Json]:
    """Queries of a table side by side, where their labels are the same."""
    return [{"id": "merge", "options": {}}, *columns(names, hidden)]


def columns(names: Mapping[str, str], hidden: Sequence[str] = ()) -> list[Json]:
    """Columns renamed, in this order, and some left out; the time is that of now."""
    return [
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(("Time", *hidden), True),
                "indexByName": {name: index for index, name in enumerate(names)},
                "renameByName": dict(names),
            },
        }
    ]


def coloured(name: str, states: Sequence[State]) -> Json:
    """A column whose numbers are states."""
    return override(
        name,
        mappings=[state_mapping(states)],
        custom__cellOptions={"type": "color-background", "mode": "basic"},
    )
