"""What is slow or fails for a moment beside lanes, under a real systemd: the gate, systemd itself.

Every start of a lane on cards runs a gate again that has failed, and its own start is queued
meanwhile.
"""

from __future__ import annotations

import pytest

from tests.booted import Machine
from tests.test_lane_booted import (
    RESUME,
    begin,
    environment,
    front,
    is_active,
    lane,
    settled,
    system,
    write_lane,
)

__all__ = ["system"]
pytestmark = pytest.mark.slow
GATE = "gpuguard-verify.service"
_RED = """[Service]
ExecStart=
ExecStart=/bin/sh -c "sleep 12; exit 1"
"""
AT_BOOT = "gpuguard-lane.service"
_ONCE_DEAF = """#!/bin/sh
if [ -e /run/deaf ]; then rm /run/deaf; echo 'Connection timed out' >&2; exit 1; fi
exec /usr/bin/systemctl "$@"
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


def test_systemd_that_does_not_answer_for_once_costs_no_lane(system: Machine) -> None:
    write_lane(system, "e")
    assert lane(system, "switch", "e")["status"] == 0
    tool = system.live_path("/opt/deaf/systemctl")
    tool.parent.mkdir()
    tool.write_text(_ONCE_DEAF)
    tool.chmod(0o755)
    drop_in = system.live_path(f"/etc/systemd/system/{AT_BOOT}.d/deaf.conf")
    drop_in.parent.mkdir()
    drop_in.write_text(
        "[Service]\nRestartSec=1\nEnvironment=PATH=/opt/deaf:/usr/sbin:/usr/bin:/sbin:/bin\n"
    )
    system.systemctl("daemon-reload")
    system.systemctl("stop", "lane-e.service")
    system.live_path("/run/deaf").touch()
    system.systemctl("restart", AT_BOOT)
    system.wait_for(lambda: front(system) == 200, 60, "the lane")
    system.wait_for(lambda: system.show(AT_BOOT, "ActiveState") == "inactive", 30, "its end")
    assert (system.show(AT_BOOT, "NRestarts"), system.show(AT_BOOT, "Result")) == ("1", "success")


def test_what_was_decided_is_not_tried_again(system: Machine) -> None:
    """The machine loses power during a switch: back on the lane before, and that is that."""
    write_lane(system, "slow", env={"STUB_START_SECONDS": "600"}, timeouts={"first_start": 900})
    begin(system, "slow")
    system.reboot()
    entry = settled(system)
    assert (entry["outcome"], entry["serving"]) == ("rolled-back", entry["from"]), entry["reasons"]
    system.wait_for(
        lambda: system.show(AT_BOOT, "ActiveState") in ("failed", "inactive"), 120, AT_BOOT
    )
    # whichever of the two came first; nobody tries again
    ends = {system.show(unit, "ExecMainStatus") for unit in (AT_BOOT, RESUME)}
    assert ends <= {"0", "70"}
    assert front(system) == 200
    assert lane(system, "history")["switches"][-1] == entry
