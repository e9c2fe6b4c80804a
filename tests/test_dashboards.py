"""The dashboards: Grafana's own schema, Prometheus' own parser, our own tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring import (
    DASHBOARDS,
    GRAFANA,
    filled,
    panels,
    problems_of,
    queries,
    run,
    selectors,
)
from tools.dashboards import rendered

by_name = pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
#: Metrics whose numbers are words.
STATES = {
    "gpuguard_p2p_pair_ok", "gpuguard_p2p_pair_status", "gpuguard_module_patched",
    "gpuguard_kernel_ready", "gpuguard_package_held", "gpuguard_probe_success",
    "instance:gpuguard_verdict:code",
}  # fmt: skip


def test_the_json_is_what_the_code_makes() -> None:
    for path, text in rendered():
        assert path.read_text() == text, "run: python -m tools.dashboards"
    assert sorted(path for path, _ in rendered()) == DASHBOARDS


@by_name
def test_grafana_knows_every_key(file: Path) -> None:
    """Its decoder drops what it does not know; so nothing may be missing after a round."""
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason="the dev extra")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    ours = json.loads(file.read_text())
    decoded = Dashboard.from_json(json.loads(file.read_text()))
    theirs = json.loads(json.dumps(decoded, cls=JSONEncoder))
    assert list(lost(ours, theirs)) == []


def lost(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """What the first has and the second has not, or otherwise."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if key in theirs:
                yield from lost(value, theirs[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is unknown"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(one, other, f"{where}[{index}]")
    elif ours != theirs:
        yield f"{where}: {ours!r} became {theirs!r}"


def test_an_unknown_key_would_be_found() -> None:
    assert list(lost({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]})) == [".a[0].c is unknown"]


@by_name
def test_no_datasource_and_no_host_is_named(file: Path) -> None:
    document = json.loads(file.read_text())
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert document["templating"]["list"][0]["type"] == "datasource"
    assert list(named(document, "datasource"))
    assert all(source == chosen for source in named(document, "datasource"))
    assert not re.search(r'instance=~?\\"(?!\$instance)', json.dumps(document))


def named(document: Any, key: str) -> Iterator[Any]:
    """Every value of a key, however deep."""
    if isinstance(document, dict):
        yield from (value for name, value in document.items() if name == key)
    inside = document.values() if isinstance(document, dict) else document
    if isinstance(document, (dict, list)):
        for value in inside:
            yield from named(value, key)


@by_name
def test_every_panel_is_explained_and_has_a_unit(file: Path) -> None:
    for panel in panels(file):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["noValue"], panel["title"]


@by_name
def test_panels_do_not_overlap(file: Path) -> None:
    taken: set[tuple[int, int]] = set()
    document = json.loads(file.read_text())
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in document["panels"]]
    assert len(ids) == len(set(ids))


@by_name
def test_states_are_shown_as_words(file: Path) -> None:
    """A number that stands for a state has a mapping in its panel, for each of its columns."""
    for panel, expr in queries(file):
        asked = {selector.name for selector in selectors(expr)}
        is_state = re.match(r"^(min|max)?\s*(by \([^)]*\) )?\(?[\w:]+(\{[^}]*\})?\)?$", expr)
        if asked & STATES and is_state:
            fields = panel["fieldConfig"]
            mapped = fields["defaults"]["mappings"] or [
                p for o in fields["overrides"] for p in o["properties"] if p["id"] == "mappings"
            ]
            assert mapped, panel["title"]


@by_name
def test_columns_that_are_renamed_are_the_ones_that_are_styled(file: Path) -> None:
    for panel in panels(file):
        names = {
            name
            for step in panel["transformations"]
            if step["id"] == "organize"
            for name in step["options"]["renameByName"].values()
        }
        styled = {o["matcher"]["options"] for o in panel["fieldConfig"]["overrides"]}
        if names:
            assert styled <= names, panel["title"]


@by_name
def test_metrics_and_labels_exist(file: Path) -> None:
    asked = [selector for _, expr in queries(file) for selector in selectors(expr)]
    assert asked
    assert [problem for selector in asked for problem in problems_of(selector)] == []
    variables = [
        v["query"]["query"] for v in json.loads(file.read_text())["templating"]["list"][1:]
    ]
    names = [selector for query in variables for selector in selectors(query)]
    assert [problem for selector in names for problem in problems_of(selector)] == []
    assert len(names) == len(variables)


@by_name
def test_prometheus_parses_every_query(file: Path, tmp_path: Path) -> None:
    records = [{"record": "parsed", "expr": filled(expr)} for _, expr in queries(file)]
    groups = [{"name": str(number), "rules": [rule]} for number, rule in enumerate(records)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
    done = run("promtool", "check", "rules", "--lint=none", tmp_path / "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(records)} rules found" in done.stdout


def test_dashboards_lead_to_each_other() -> None:
    documents = [json.loads(file.read_text()) for file in DASHBOARDS]
    uids = {document["uid"] for document in documents}
    linked = set(re.findall(r"/d/([\w-]+)", json.dumps(documents)))
    assert linked == uids


def test_provisioning_finds_the_dashboards() -> None:
    files = yaml.safe_load((GRAFANA / "provisioning/dashboards/gpuguard.yaml").read_text())
    (provider,) = files["providers"]
    assert provider["options"]["path"] == "/usr/local/share/gpuguard/grafana/dashboards"
    example = GRAFANA / "provisioning/datasources/gpuguard-prometheus.yaml.example"
    (source,) = yaml.safe_load(example.read_text())["datasources"]
    assert "uid" not in source
    assert source["type"] == "prometheus"
