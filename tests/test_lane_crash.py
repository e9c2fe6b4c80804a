"""A switch that is killed, or loses power, at every step: it ends with exactly one lane."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lanekit import LaneHost, settle, wait_for

pytestmark = pytest.mark.slow
#: More renames than a switch makes: how many there are is counted by going on until none is left.
_MANY = 60


@pytest.fixture
def two(lane_host: LaneHost) -> LaneHost:
    """Lanes a and b, known to this host, behind the front; a serves."""
    settle(lane_host, b={}, a={})
    return settle(lane_host, a={}, b={})


def back_to_a(host: LaneHost) -> None:
    if host.serving() != host.lane_id("a"):
        assert host.switch("a")["outcome"] == "promoted"


def recorded_step(host: LaneHost) -> str | None:
    switch = host.state("switch")
    return None if switch is None else str(switch["step"])


def check_settled(host: LaneHost, step: str | None, *lanes: str) -> dict[str, Any]:
    """One of the lanes serves, the records agree, and the switch is written down once."""
    try:
        wait_for(lambda: host.front() == 200, f"a lane after a crash in {step}")
    except AssertionError as error:
        raise AssertionError(host.run("lane", "status").out) from error
    serving = host.serving()
    assert serving in [host.lane_id(name) for name in lanes], step
    active = host.state("active")
    assert active is not None
    assert active["lane_id"] == serving
    assert host.state("switch") is None
    history = host.history()
    assert len({entry["id"] for entry in history}) == len(history)
    assert history[-1]["serving"] == serving
    assert host.json("lane", "status")["verdict"] == "ok"
    return history[-1]


def test_kill_9_before_every_write_of_a_switch(two: LaneHost) -> None:
    steps = set()
    for number in range(1, _MANY):
        back_to_a(two)
        died = two.run("lane", "switch", "b", die_at=number)
        if died.status == 0:
            break
        assert died.status == -9
        step = recorded_step(two)
        steps.add(step)
        seen = two.json("lane", "status")
        if step not in (None, "done"):
            codes = [notice["code"] for notice in seen["notices"]]
            assert "lane-switch-interrupted" in codes, step
        assert two.run("lane", "resume").status in (0, 69), step
        entry = check_settled(two, step, "a", "b")
        expected = "a" if step in (None, "preflight", "snapshot", "drain", "undrain") else "b"
        assert two.serving() == two.lane_id(expected), (number, step, entry)
    else:
        pytest.fail("it never came to its end")
    assert {"preflight", "snapshot", "drain", "stop", "start", "ready", "identity", "gate"} <= steps


def test_kill_9_before_every_write_of_a_way_back(two: LaneHost) -> None:
    two.lane("bad", env={"STUB_ANSWER": "!"})
    outcomes = set()
    for number in range(6, _MANY, 3):
        back_to_a(two)
        died = two.run("lane", "switch", "bad", die_at=number)
        if died.status != -9:
            break
        step = recorded_step(two)
        two.run("lane", "resume")
        entry = check_settled(two, step, "a")
        outcomes.add(entry["outcome"])
    assert outcomes <= {"refused", "rolled-back"}
    assert "rolled-back" in outcomes


@pytest.mark.parametrize(
    ("until", "least"), [("drain", 3), ("stop", 5), ("ready", 8), ("gate", 10), ("promote", 11)]
)
def test_power_loss_in_a_step(two: LaneHost, until: str, least: int) -> None:
    two.lane("c")
    number = next(n for n in range(least, _MANY) if step_before(two, n) == until)
    assert recorded_step(two) == until
    two.boot()
    two.start_front()
    status = two.run("lane", "resume").status
    entry = check_settled(two, until, "a", "c")
    if until == "promote":  # decided already
        assert (status, two.serving()) == (0, two.lane_id("c")), (number, entry)
    else:  # what a machine may have died of is not tried again
        assert two.serving() == two.lane_id("a"), (number, entry)
        assert entry["outcome"] == ("refused" if until == "drain" else "rolled-back")


def step_before(host: LaneHost, number: int) -> str | None:
    """Let a switch die before a write; the step that it was in."""
    host.run("lane", "resume")
    if host.serving() != host.lane_id("a"):
        back_to_a(host)
    host.run("lane", "switch", "c", die_at=number)
    return recorded_step(host)


def test_a_second_crash_gives_the_new_lane_up(two: LaneHost) -> None:
    number = next(n for n in range(7, _MANY) if die(two, n) == "ready")
    resumed = two.run("lane", "resume", die_at=3)
    assert (resumed.status, recorded_step(two)) == (-9, "ready"), number
    assert two.run("lane", "resume").status == 70
    entry = check_settled(two, "ready", "a")
    assert "interrupted again" in " ".join(entry["reasons"])


def die(host: LaneHost, number: int) -> str | None:
    host.run("lane", "resume")
    back_to_a(host)
    host.run("lane", "switch", "b", die_at=number)
    return recorded_step(host)
