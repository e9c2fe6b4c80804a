"""Lanes on cards behind a gate that is red and slow, under a real systemd.

Every start of such a lane runs a gate again that has failed, and its own start is queued meanwhile.
"""

from __future__ import annotations

import pytest

from tests.booted import Machine
from tests.test_lane_booted import environment, front, is_active, lane, system, write_lane

__all__ = ["system"]
pytestmark = pytest.mark.slow
GATE = "gpuguard-verify.service"
_RED = """[Service]
ExecStart=
ExecStart=/bin/sh -c "sleep 12; exit 1"
"""
_ON_CARDS = {"engine": {"gpus": "all"}, "requires": {"p2p": "preferred"}}


def preferring(system: Machine, name: str, limit: int = 60) -> None:
    write_lane(
        system, name, **_ON_CARDS, env={"VLLM_ENGINE_READY_TIMEOUT_S": limit - 1},
        timeouts={"first_start": limit, "start": 60},
    )  # fmt: skip


def test_forward_and_back_behind_a_gate_that_fails_slowly(system: Machine) -> None:
    drop_in = system.live_path(f"/etc/systemd/system/{GATE}.d/red.conf")
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text(_RED)
    system.systemctl("daemon-reload")
    for name in ("c", "d"):
        preferring(system, name)
    for words in (("switch", "c"), ("switch", "d"), ("rollback",)):
        done = lane(system, *words)
        assert (done["status"], front(system)) == (0, 200), done["reasons"]
    assert (is_active(system, "c"), is_active(system, "d")) == (True, False)
    assert "NCCL_P2P_DISABLE=1" in environment(system, "c")
    assert system.show(GATE, "Result") == "exit-code"


def test_a_start_that_is_queued_is_taken_back(system: Machine) -> None:
    """The lane before starts behind the same run of the gate, and alone."""
    preferring(system, "hasty", limit=4)
    done = lane(system, "switch", "hasty")
    assert (done["status"], done["outcome"]) == (70, "rolled-back"), done["reasons"]
    assert "waits for units before it" in done["reasons"][0]
    assert (is_active(system, "c"), is_active(system, "hasty"), front(system)) == (
        True, False, 200,
    )  # fmt: skip
    assert system.show("lane-hasty.service", "InvocationID") == ""
