"""P2P for lanes is proven by bytes, not by the driver's word: made, kept, refused, lost.

The program, its children, their protocol and the kernels are the real ones; in the place of
NVIDIA's bindings and of NCCL lie stand-ins whose cards are memory of the CPU.
"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests import nccl_standin
from tests.lanekit import REPOSITORY, LaneHost, lane_host

__all__ = ["lane_host"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc"),
    pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has real cards"),
]
DRIVER = "580.95.05"
CARDS = [f"GPU-{uuid.UUID(bytes=bytes([number] * 16))}" for number in range(2)]
ON_CARDS: dict[str, Any] = {
    "engine": {"gpus": "all"},
    "args": {"tensor-parallel-size": 2, "disable-custom-all-reduce": True},
    "env": {"NCCL_P2P_LEVEL": "SYS"},
    "timeouts": {"prove": 60},
}
REQUIRED = {**ON_CARDS, "requires": {"p2p": "required"}}
PREFERRED = {**ON_CARDS, "requires": {"p2p": "preferred"}}
RECORD = "/run/gpuguard/proof-deep.json"


@pytest.fixture
def host(lane_host: LaneHost) -> LaneHost:
    """Two cards whose P2P the driver grants, and what is needed to move bytes over them."""
    lane_host.pretend_driver(DRIVER)
    lane_host.pretend_cards(used=0, total=(1 << 30) + (2 << 20), uuids=CARDS)
    install(lane_host)
    lane_host.prove(driver=DRIVER, cards=CARDS, pairs=2)
    lane_host.start_front()
    return lane_host


def install(host: LaneHost, *, mirror: str = "", hang: str = "", nccl: str = "") -> None:
    """What a real host has by ``pip install gpuguard[deep]``."""
    place = host.path("/opt/cuda")
    shutil.copytree(REPOSITORY / "tests/standin_cuda", place, dirs_exist_ok=True)
    options = f"CARDS = 2\nMIRROR = {mirror!r}\nHANG = {hang!r}\n"
    (place / "standin_options.py").write_text(options)
    nccl_standin.build(place, nccl)


def uninstall(host: LaneHost, what: str) -> None:
    """Take a part away, whatever else is installed on the machine that runs the tests."""
    place = host.path("/opt/cuda")
    if what == "nccl":
        shutil.rmtree(place / "nvidia")
        return
    shutil.rmtree(place / "cuda")
    (place / "cuda").mkdir()
    (place / "cuda/__init__.py").write_text("")


def record(host: LaneHost) -> dict[str, Any] | None:
    file = host.path(RECORD)
    return dict(json.loads(file.read_text())) if file.exists() else None


def environment(host: LaneHost, name: str) -> dict[str, str]:
    pid = host.unit(f"lane-{name}.service")["MainPID"]
    text = Path(f"/proc/{pid}/environ").read_text()
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def test_a_switch_proves_it_once_the_old_lane_has_stopped(host: LaneHost) -> None:
    host.lane("a")
    host.lane("b", **REQUIRED)
    assert host.switch("a")["outcome"] == "promoted"
    plan = host.json("lane", "switch", "b", "-n")
    assert (plan["refusals"], record(host)) == ([], None)
    assert any("will be proven by bytes once the cards are free" in n for n in plan["notes"])
    done = host.switch("b")
    assert done["outcome"] == "promoted", done["reasons"]
    kept = record(host)
    assert kept is not None
    assert (kept["problem"], kept["pairs"], kept["all_reduce"]) == (None, 2, True)
    assert (kept["cards"], kept["driver"]) == (CARDS, DRIVER)
    assert "NCCL_P2P_DISABLE" not in environment(host, "b")
    status = host.json("lane", "status")
    assert status["p2p"]["tier"] == "bytes"
    assert "lane-p2p-unproven" not in [notice["code"] for notice in status["notices"]]
