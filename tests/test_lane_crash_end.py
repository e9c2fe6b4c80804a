"""kill -9 or a power loss, in turn, while a switch is on its way to a fallback, or to nothing."""

from __future__ import annotations

import pytest

from tests.lanekit import LaneHost, settle, wait_for
from tests.test_lane_crash import check_settled
from tests.test_lane_faults import break_lane_a, mend_lane_a

pytestmark = pytest.mark.slow
#: More renames than a switch makes: how many there are is counted by going on until none is left.
_MANY = 60
_FATAL = {"STUB_FATAL": "Engine core initialization failed"}
_PAST = 11  # the first so many are the new lane's, until it fails


@pytest.fixture
def host(lane_host: LaneHost) -> LaneHost:
    """Lane a serves behind the front, and c was good once."""
    settle(lane_host, c={}, a={})
    break_lane_a(lane_host)
    return lane_host


def back_to_a(host: LaneHost) -> None:
    mend_lane_a(host)
    if host.serving() != host.lane_id("a"):
        assert host.switch("a")["outcome"] == "promoted"
    wait_for(lambda: host.front() == 200, "lane a")
    break_lane_a(host)


def lose_power(host: LaneHost) -> None:
    host.boot()
    host.start_front()


def where(host: LaneHost) -> tuple[str, str] | None:
    switch = host.state("switch")
    return None if switch is None else (str(switch["role"]), str(switch["step"]))


def test_on_the_way_to_a_fallback(host: LaneHost) -> None:
    host.lane("b", env=_FATAL, fallback=["c"])
    seen = set()
    for number in range(_PAST, _MANY, 2):
        back_to_a(host)
        if host.run("lane", "switch", "b", die_at=number).status != -9:
            break
        at = where(host)
        if at is None or at[0] != "fallback" or at in seen:
            host.run("lane", "resume")
            continue
        seen.add(at)
        if len(seen) % 2 == 0:
            lose_power(host)
        assert host.run("lane", "resume").status == 70, at
        entry = check_settled(host, at[1], "c")
        assert entry["outcome"] == "fell-back", at
    else:
        pytest.fail("it never came to its end")
    assert len(seen) >= 3, seen


def test_on_the_way_to_nothing(host: LaneHost) -> None:
    host.lane("b", env=_FATAL)
    seen: set[int] = set()
    for number in range(_PAST, _MANY):
        back_to_a(host)
        if host.run("lane", "switch", "b", die_at=number).status != -9:
            break
        at = where(host)
        if at is None or at[1] != "halt":
            host.run("lane", "resume")
            continue
        seen.add(number)
        if len(seen) % 2 == 0:
            lose_power(host)
        assert host.run("lane", "resume").status == 71, at
        assert (host.serving(), host.front(), where(host)) == (None, 503, None), at
        assert host.history()[-1]["outcome"] == "failed"
        assert "no lane is active" in host.run("lane", "resume").out  # and so it stays
        assert (host.serving(), host.front()) == (None, 503)
    else:
        pytest.fail("it never came to its end")
    assert len(seen) >= 2
