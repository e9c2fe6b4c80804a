"""The lanes as series: from records that the lanes' own code writes, and an engine that answers."""

from __future__ import annotations

import http.server
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuguard.core.metrics import METRICS, Probe
from gpuguard.core.observation import Part
from gpuguard.core.samples_lanes import OUTCOMES, STEPS
from gpuguard.host import LocalHost
from gpuguard.serving import store
from gpuguard.serving.front_config import Route, render_front
from gpuguard.serving.lane_file import parse_lane
from gpuguard.serving.machine import Outcome, Step, Switch
from gpuguard.verbs.observe import observe
from tests.daemon_kit import Series, cards_only, configure, free_port, parse, serving, value
from tests.monitoring import alerts
from tests.monitoring_kit import http_server
from tests.p2pbox import P2pBox
from tests.test_lane_lint import make_lane
from tests.test_lane_render import preset
from tests.unprivileged import as_nobody, public_dir

A, B = "a-000000000000", "b-111111111111"
SWITCH = Switch(
    switch_id="1", kind="switch", started="2026-11-30T01:00:00Z", boot_id="x", new=B, old=A
)


@pytest.fixture
def box() -> Iterator[P2pBox]:
    with public_dir() as folder:
        made = cards_only(folder / "host", 2)
        made.configure()
        configure(made.root)
        yield made


def series_of(box: P2pBox) -> Series:
    answer = box.run("metrics")
    assert answer.status == 0, answer.err
    return parse(answer.out)


def lanes_of(series: Series) -> dict[str, float]:
    """The lanes' series without labels."""
    return {name: number for (name, labels), number in series.items()
            if name.startswith("gpuguard_lane_") and not labels}  # fmt: skip


def end(host: LocalHost, number: int, outcome: str, ended: str) -> None:
    store.append_history(host, {"id": str(number), "outcome": outcome, "ended": ended})


def set_front(box: P2pBox, port: int) -> None:
    file = box.root / "etc/gpuguard/front.cfg"
    file.write_text(render_front("127.0.0.1:8000", 30, Route(port, is_open=True)))


def test_words_are_those_of_the_switch() -> None:
    assert tuple(step.value for step in Step) == STEPS
    assert tuple(outcome.value for outcome in Outcome) == OUTCOMES
    (numbers,) = (m.values for m in METRICS if m.name == "gpuguard_lane_switch_step")
    assert numbers.endswith(", ".join(f"{n} {step}" for n, step in enumerate(STEPS, 1)))


def test_a_host_without_lanes_has_no_series_of_them(box: P2pBox) -> None:
    assert not any("lane" in f"{name}{labels}" for name, labels in series_of(box))


def test_a_lane_serves(box: P2pBox) -> None:
    host = LocalHost(box.root)
    store.write_active(host, store.Active(lane_id=A, last_good=A))
    end(host, 1, "failed", "2026-11-29T01:00:00Z")
    end(host, 2, "promoted", "2026-11-30T01:00:00Z")
    series = series_of(box)
    assert value(series, "gpuguard_lane_info", lane="a", lane_id=A) == 1
    assert lanes_of(series) == {
        "gpuguard_lane_active": 1, "gpuguard_lane_switching": 0, "gpuguard_lane_switch_step": 0,
        "gpuguard_lane_last_switch_timestamp_seconds": 1796000400,
    }  # fmt: skip
    last = {o: value(series, "gpuguard_lane_last_switch_outcome", outcome=o) for o in OUTCOMES}
    assert last == {**dict.fromkeys(OUTCOMES, 0), "promoted": 1}
    ended = {o: value(series, "gpuguard_lane_switches_total", outcome=o) for o in OUTCOMES}
    assert ended == {**dict.fromkeys(OUTCOMES, 0), "promoted": 1, "failed": 1}
    assert value(series, "gpuguard_probe_success", probe="lanes") == 1


def test_a_switch_under_way_and_none_that_serves(box: P2pBox) -> None:
    host = LocalHost(box.root)
    store.write_active(host, store.Active(last_good=A))
    store.write_switch(host, replace(SWITCH, step=Step.READY))
    series = lanes_of(series_of(box))
    assert series["gpuguard_lane_active"] == 0
    assert series["gpuguard_lane_switching"] == 1
    assert series["gpuguard_lane_switch_step"] == 6
    assert series["gpuguard_lane_switch_started_timestamp_seconds"] == 1796000400
    assert series["gpuguard_lane_last_switch_timestamp_seconds"] == 0


@pytest.mark.parametrize("name", ["switch.json", "active.json"])
def test_a_record_that_cannot_be_read_leaves_no_series(box: P2pBox, name: str) -> None:
    store.write_active(LocalHost(box.root), store.Active(lane_id=A, last_good=A))
    (box.root / f"var/lib/gpuguard/lanes/{name}").write_text("{")
    series = series_of(box)
    assert value(series, "gpuguard_probe_success", probe="lanes") == 0
    assert not any(name.startswith("gpuguard_lane_") for name, _ in series)


def lanes_part(box: P2pBox) -> Part:
    return next(p for p in observe(LocalHost(box.root), None).parts if p.probe is Probe.LANES)


def test_p2p_as_wanted_and_as_started(box: P2pBox) -> None:
    host = LocalHost(box.root)
    lane = make_lane(requires={"p2p": "preferred"})
    store.write_release(host, store.Release(lane, ()), anew=True)
    store.write_active(host, store.Active(lane_id=lane.lane_id, last_good=lane.lane_id))
    series = lanes_of(series_of(box))
    assert series["gpuguard_lane_p2p_wanted"] == 1
    assert "gpuguard_lane_p2p_on" not in series
    environment = box.root / f"run/gpuguard/lanes/{lane.name}.env"
    environment.parent.mkdir(parents=True)
    for text, is_on in (("# made\n", 1), ("# made\nNCCL_P2P_DISABLE=1\n", 0)):
        environment.write_text(text)
        assert lanes_of(series_of(box))["gpuguard_lane_p2p_on"] == is_on
    with as_nobody():  # the release is root's alone: not known, and the rest is
        part = lanes_part(box)
    names = {sample.name for sample in part.samples}
    assert part.problem is None
    assert {"gpuguard_lane_info", "gpuguard_lane_p2p_on"} <= names
    assert "gpuguard_lane_p2p_wanted" not in names


@pytest.mark.parametrize("name", ["int4", "fp8", "bf16", "dense27b"])
def test_a_switch_within_the_limits_of_a_preset_is_not_stuck(name: str) -> None:
    """The new lane fails at the very end, and the one before, which is warm, comes back."""
    lane = parse_lane(preset(name), f"{name}.yaml", name)
    limits = lane.timeouts
    stop = limits.stop + 120 + limits.memory  # until it is killed, and the cards are free
    starts = limits.first_start + limits.start + 2 * (limits.prove + 60)
    longest = limits.drain + 2 * stop + starts + 2 * lane.gate.seconds
    (stuck,) = (rule for rule in alerts() if rule["alert"] == "GpuguardLaneSwitchStuck")
    assert longest < int(stuck["expr"].rpartition(" ")[2])


class Dead(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_the_engine_is_asked_where_the_front_leads(box: P2pBox) -> None:
    store.write_active(LocalHost(box.root), store.Active(lane_id=A, last_good=A))
    for engine, is_ready in ((Engine, 1), (Dead, 0)):
        with http_server(engine) as address:
            set_front(box, int(address.rpartition(":")[2]))
            assert lanes_of(series_of(box))["gpuguard_lane_ready"] == is_ready
    assert lanes_of(series_of(box))["gpuguard_lane_ready"] == 0


def records(root: Path) -> LocalHost:
    host = LocalHost(root)
    store.write_active(host, store.Active(lane_id=A, last_good=A))
    return host


@pytest.mark.slow
def test_the_daemon_notices_a_switch_at_once(box: P2pBox) -> None:
    """Long before its interval is over."""
    host = records(box.root)
    configure(box.root, interval=3600)
    with serving(box.root) as served:
        served.await_series(lambda s: value(s, "gpuguard_lane_switching") == 0)
        store.write_switch(host, replace(SWITCH, step=Step.DRAIN))
        served.await_series(lambda s: value(s, "gpuguard_lane_switch_step") == 3)
        store.write_active(host, store.Active(lane_id=B, last_good=B))
        store.remove_switch(host)
        found = served.await_series(lambda s: value(s, "gpuguard_lane_switching") == 0)
        assert value(found, "gpuguard_lane_info", lane="b", lane_id=B) == 1


@pytest.mark.slow
def test_the_daemon_notices_an_engine_that_comes_and_goes(box: P2pBox) -> None:
    """No file changes then: it is asked each time."""
    records(box.root)
    set_front(box, port := free_port())
    configure(box.root, interval=1)
    with serving(box.root) as served:
        served.await_series(lambda s: value(s, "gpuguard_lane_ready") == 0)
        with http_server(Engine, port):
            served.await_series(lambda s: value(s, "gpuguard_lane_ready") == 1)
        served.await_series(lambda s: value(s, "gpuguard_lane_ready") == 0)
