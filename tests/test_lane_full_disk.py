"""The disk is full at any write of a switch: for a moment, or until somebody makes room."""

from __future__ import annotations

import pytest

from tests.lanekit import LaneHost, Said
from tests.test_lane_crash import _MANY, back_to_a, check_settled, recorded_step, two

__all__ = ["two"]
pytestmark = pytest.mark.slow


def is_told(host: LaneHost, said: Said) -> bool:
    """That there was no room: on the screen, or in what is kept of the switch."""
    last = host.history()[-1]
    return "No space left" in f"{said.out}{said.err}{last['notes']}"


def test_no_room_for_a_moment(two: LaneHost) -> None:
    """One lane serves at the end of each, and nobody has to do anything."""
    outcomes = set()
    for number in range(1, _MANY):
        back_to_a(two)
        said = two.run("lane", "switch", "b", full=range(number, number + 1))
        if not is_told(two, said):
            break
        assert two.front() == 200, (number, said.err)
        two.run("lane", "resume")  # where the proxy's file is not written, that does it
        entry = check_settled(two, None, "a", "b")
        if number == 1:  # nothing was begun
            assert (said.status, two.serving()) == (74, two.lane_id("a"))
            continue
        outcomes.add(entry["outcome"])
        expected = {"refused": 69, "rolled-back": 70, "promoted": 0}[entry["outcome"]]
        assert said.status == (69 if "front.cfg" in said.err else expected), (number, said.err)
        served = "b" if entry["outcome"] == "promoted" else "a"
        assert two.serving() == two.lane_id(served), number
    else:
        pytest.fail("it never came to its end")
    assert outcomes == {"refused", "rolled-back", "promoted"}


def test_no_room_from_a_write_on(two: LaneHost) -> None:
    """Traffic stays on the lane before until that is stopped; then it is said how to go on."""
    stood = set()
    for number in range(1, _MANY):
        back_to_a(two)
        said = two.run("lane", "switch", "b", full=range(number, _MANY))
        if not is_told(two, said):
            break
        step = recorded_step(two)
        if step is None:  # it came to its end: refused, or promoted with a note
            assert two.front() == 200, (number, said.err)
            two.run("lane", "resume")
        else:
            assert (said.status, two.front()) == (74, 503), (number, step)
            assert "[lane-switch-stands]" in said.err, (number, said.err)
            assert "gpuguard lane resume" in said.err
            assert two.run("lane", "resume", full=range(1, _MANY)).status == 74, step
            two.run("lane", "resume")
        check_settled(two, step, "a", "b")
        stood.add(step)
    else:
        pytest.fail("it never came to its end")
    assert {None, "stop", "start", "ready", "identity", "gate"} <= stood
