"""The wall clock jumps while a lane is switched: NTP after a boot, a battery that is empty.

Every program of the machine sees the jump, by a library before the C library's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from tests.lanekit import PROGRAM, LaneHost, settle, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc"),
]
DAY = 86400
CLOCK, SHIM = "/opt/clock", "/opt/clockshim.so"
SWITCH = "/var/lib/gpuguard/lanes/switch.json"


@pytest.fixture
def host(lane_host: LaneHost) -> LaneHost:
    """Lane a serves; lane b needs a moment to start."""
    source = Path(__file__).parent / "clockshim.c"
    library = lane_host.path(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    settle(lane_host, a={})
    lane_host.lane("b", env={"STUB_START_SECONDS": "2"})
    return lane_host


def begin(host: LaneHost, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PROGRAM, "--json", "lane", *words], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={
            **os.environ, "PATH": f"/opt/tools:{os.environ['PATH']}",
            "LD_PRELOAD": SHIM, "CLOCKSHIM": CLOCK,
        },
        preexec_fn=host.enter,  # noqa: PLW1509 - to become one of that machine
    )  # fmt: skip


def set_clock(host: LaneHost, off: int) -> None:
    new = host.path(f"{CLOCK}.new")
    new.write_text(str(off))
    new.rename(host.path(CLOCK))


@pytest.mark.parametrize("off", [400 * DAY, -400 * DAY], ids=["ahead", "back"])
def test_a_jump_during_a_switch_costs_nothing(host: LaneHost, off: int) -> None:
    set_clock(host, 0)
    run = begin(host, "switch", "b")
    record = host.path(SWITCH)
    wait_for(lambda: record.exists() and '"ready"' in record.read_text(), "the step")
    set_clock(host, off)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, out + err
    assert (host.serving(), host.front()) == (host.lane_id("b"), 200)

    entry = host.json("lane", "history")["switches"][-1]
    assert entry["outcome"] == "promoted"
    took = datetime.fromisoformat(entry["ended"]) - datetime.fromisoformat(entry["started"])
    assert abs(took.total_seconds() - off) < DAY  # it did jump
    assert all(0 <= spent < 60 for spent in entry["seconds"].values()), entry["seconds"]
    # what is kept of it tells how long the next one takes, and which lane is the one before
    run = begin(host, "rollback")
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, out + err
    assert (host.serving(), host.front()) == (host.lane_id("a"), 200)
    names = [e["to"] for e in host.json("lane", "history")["switches"]]
    assert names[-2:] == [host.lane_id("b"), host.lane_id("a")]


def test_a_switch_is_finished_under_another_clock(host: LaneHost) -> None:
    set_clock(host, 0)
    run = begin(host, "switch", "b")
    record = host.path(SWITCH)
    wait_for(lambda: record.exists() and '"ready"' in record.read_text(), "the step")
    run.kill()
    run.communicate()
    set_clock(host, -400 * DAY)
    run = begin(host, "resume")
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, out + err
    assert (host.serving(), host.front()) == (host.lane_id("b"), 200)
    assert not record.exists()
