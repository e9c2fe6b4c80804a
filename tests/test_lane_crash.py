"""A switch that is killed, or loses power, at every step: it ends with exactly one lane."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.lanekit import LaneHost, Running, settle, wait_for

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


def step_before(host: LaneHost, number: int, name: str = "c") -> str | None:
    """Let a switch die before a write; the step that it was in."""
    host.run("lane", "resume")
    if host.serving() != host.lane_id("a"):
        back_to_a(host)
    host.run("lane", "switch", name, die_at=number)
    return recorded_step(host)


def test_a_rollback_after_an_interrupted_switch_goes_back_once(two: LaneHost) -> None:
    two.lane("bad", env={"STUB_ANSWER": "!"})
    number = next(n for n in range(7, _MANY) if step_before(two, n, "bad") == "ready")
    before = len(two.history())
    assert two.run("lane", "rollback").status == 0
    assert two.serving() == two.lane_id("a"), number
    assert [entry["outcome"] for entry in two.history()[before:]] == ["rolled-back"]


def test_until_the_old_lane_is_stopped_it_alone_may_be_started(two: LaneHost) -> None:
    two.lane("c")
    for number in range(1, _MANY):
        step = step_before(two, number, "c")
        allowed = [name for name in ("a", "c") if two.run("lane", "prepare", name).status == 0]
        assert len(allowed) == 1, (number, step)
        if step in (None, "preflight", "snapshot", "drain"):
            assert allowed == ["a"], (number, step)
        if step in ("start", "ready"):
            assert allowed == ["c"], (number, step)
            break
    else:
        pytest.fail("it never came to the start")


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


@pytest.mark.parametrize("how", ["a signal", "the unit is stopped"])
def test_while_the_host_goes_down_no_lane_is_tried_in_vain(two: LaneHost, how: str) -> None:
    """A reboot that somebody asked for: systemd stops what runs, and starts nothing."""
    switch = slow_switch(two)
    (two.root / "run/standin-systemd/shutdown").touch()
    if how == "a signal":
        switch.kill(signal.SIGTERM)
    else:
        two.systemctl("stop", "lane-slow.service")
    said = switch.wait()
    assert (said.status, "[lane-host-goes-down]" in said.err) == (75, True), said.err
    assert recorded_step(two) == "ready"
    two.boot()
    two.start_front()
    assert two.run("lane", "resume").status == 70
    assert check_settled(two, "ready", "a")["outcome"] == "rolled-back"


# --- who waits beside a switch: gpuguard-lane-resume.service


WAIT = ("lane", "resume", "--wait", "--only-interrupted")


def waits(running: Running) -> bool:
    """The kernel lists those who wait for a lock with an arrow."""
    words = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(line[1] == "->" and str(running.pid) in line for line in words)


def slow_switch(host: LaneHost) -> Running:
    """A switch that stays in its step ready for a while."""
    host.lane("slow", env={"STUB_START_SECONDS": "3"})
    switch = host.start("lane", "switch", "slow")
    wait_for(lambda: recorded_step(host) == "ready", "the step")
    return switch


def test_who_waits_goes_on_when_the_switch_is_killed(two: LaneHost) -> None:
    switch = slow_switch(two)
    resume = two.start(*WAIT)
    wait_for(lambda: waits(resume), "somebody who waits")
    assert two.run("lane", "resume").status == 75
    switch.kill()
    switch.wait()
    said = resume.wait()
    assert said.status == 0, said.err
    assert check_settled(two, "ready", "slow")["outcome"] == "promoted"


def test_who_waits_leaves_a_switch_alone_that_comes_to_its_end(two: LaneHost) -> None:
    switch = slow_switch(two)
    resume = two.start(*WAIT)
    wait_for(lambda: waits(resume), "somebody who waits")
    assert switch.wait().status == 0
    said = resume.wait()
    assert (said.status, "nothing to do" in said.out) == (0, True), said.err
    assert two.serving() == two.lane_id("slow")


def test_who_waits_can_be_ended(two: LaneHost) -> None:
    switch = slow_switch(two)
    resume = two.start(*WAIT)
    wait_for(lambda: waits(resume), "somebody who waits")
    resume.kill(signal.SIGTERM)
    assert resume.wait().status == 128 + signal.SIGTERM
    assert switch.wait().status == 0
    assert two.serving() == two.lane_id("slow")


def test_without_an_interrupted_switch_a_drained_front_stays_so(two: LaneHost) -> None:
    assert two.run("lane", "drain").status == 0
    assert two.json(*WAIT)["active"] == two.lane_id("a")
    assert two.front() == 503
    assert two.run("lane", "resume", "--wait").status == 0
    wait_for(lambda: two.front() == 200, "the front")
