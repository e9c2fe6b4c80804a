"""A process that is none of a lane's is found before the lane that serves is stopped."""

from __future__ import annotations

import os

import pytest

from gpuguard.core.doctor_facts import NvmlCard
from gpuguard.serving.strangers import strangers
from tests.lane_outcomes import refused
from tests.lanekit import LaneHost, settle

GIB = 1 << 30


def card(**changes: object) -> NvmlCard:
    known = {"bus_id": "01", "uuid": "GPU-0", "memory_used_bytes": 30 * GIB, "processes": (1, 2)}
    return NvmlCard(**{**known, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "own", "is_busy"),
    [
        ({}, {1, 2}, False),
        ({"processes": ()}, set(), False),  # what is left is the stop's to judge
        ({"process_bytes": ((1, 20 * GIB), (2, 9 * GIB))}, {1}, True),
        ({"process_bytes": ((1, 20 * GIB), (2, GIB // 8))}, {1}, False),  # a display
        ({}, {1}, True),  # nobody says how much it has
        ({"display_active": True}, {1}, False),
        ({}, set(), True),
        ({"memory_used_bytes": GIB // 4}, set(), False),
    ],
)
def test_whose_memory_it_is(changes: dict[str, object], own: set[int], is_busy: bool) -> None:
    assert bool(list(strangers([card(**changes)], frozenset(own), {}))) is is_busy


@pytest.mark.slow
def test_a_stranger_on_a_card_keeps_the_lane_that_serves_up(lane_host: LaneHost) -> None:
    host = lane_host
    host.pretend_bus(1)
    host.pretend_driver("580.95.05")
    host.pretend_cards(used=300 << 20)
    settle(host, a={"engine": {"gpus": "all"}})
    host.lane("b", engine={"gpus": "all"})
    main = host.unit("lane-a.service")["MainPID"]
    child = int(host.command("ps", "-o", "pid=", "--ppid", str(main)).stdout.split()[0])
    known = {str(child): 20 << 30}
    host.pretend_cards(used=20 << 30, processes=[child], process_bytes=known)
    assert host.json("lane", "switch", "b", "-n")["refusals"] == []
    both = {
        "processes": [child, os.getpid()],
        "process_bytes": {**known, str(os.getpid()): 9 << 30},
    }
    host.pretend_cards(used=29 << 30, **both)
    assert refused(host, "b") == ["lane-cards-busy"]
    assert f"(processes on it: {os.getpid()})" in host.history()[-1]["reasons"][0]
