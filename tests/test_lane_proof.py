"""P2P for lanes is proven by bytes, not by the driver's word: made, kept, refused, lost.

The program, its children, their protocol and the kernels are the real ones; in the place of
NVIDIA's bindings and of NCCL lie stand-ins whose cards are memory of the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests import nccl_standin
from tests.lane_outcomes import environment, refused
from tests.lanekit import REPOSITORY, LaneHost, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc"),
    pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has real cards"),
]
CARDS = [f"GPU-{uuid.UUID(bytes=bytes([number] * 16))}" for number in range(2)]
ON_CARDS: dict[str, Any] = {
    "engine": {"gpus": "all"},
    "args": {"tensor-parallel-size": 2, "disable-custom-all-reduce": True},
    "env": {"NCCL_P2P_LEVEL": "SYS"},
    "timeouts": {"prove": 60},
}
REQUIRED = {**ON_CARDS, "requires": {"p2p": "required"}}
PREFERRED = {**ON_CARDS, "requires": {"p2p": "preferred"}}
FREE = {"used": 0, "total": (1 << 30) + (2 << 20), "uuids": CARDS}  # small: quick on a CPU
MADE = "moves bytes between the cards"


@pytest.fixture
def host(lane_host: LaneHost) -> LaneHost:
    """Two cards whose P2P the driver grants, what moves bytes over them, and a lane without."""
    lane_host.pretend_driver()
    lane_host.pretend_cards(**FREE)
    install(lane_host)
    grant(lane_host)
    lane_host.start_front()
    lane_host.lane("a")
    assert lane_host.switch("a")["outcome"] == "promoted"
    return lane_host


def install(host: LaneHost, *, mirror: str = "", hang: str = "") -> None:
    """What a real host has by ``pip install gpuguard[deep]``."""
    place = host.path("/opt/cuda")
    shutil.copytree(REPOSITORY / "tests/standin_cuda", place, dirs_exist_ok=True)
    options = f"CARDS = 2\nMIRROR = {mirror!r}\nHANG = {hang!r}\n"
    (place / "standin_options.py").write_text(options)
    nccl_standin.build(place)


def uninstall(host: LaneHost, what: str) -> None:
    """Take a part away, whatever else is installed on the machine that runs the tests."""
    place = host.path("/opt/cuda")
    if what == "NCCL":
        (place / "nvidia/nccl/lib/libnccl.so.2").write_text("no library")
        return
    shutil.rmtree(place / "cuda")
    (place / "cuda").mkdir()
    (place / "cuda/__init__.py").write_text("")


def grant(host: LaneHost) -> None:
    """What the gate leaves at each boot."""
    boot = host.command("cat", "/proc/sys/kernel/random/boot_id").stdout.strip()
    host.prove(boot_id=boot, cards=CARDS, pairs=2)


def record(host: LaneHost) -> dict[str, Any] | None:
    file = host.path("/run/gpuguard/proof-deep.json")
    return dict(json.loads(file.read_text())) if file.exists() else None


def log(host: LaneHost, name: str) -> str:
    """Of the last start of a lane's unit."""
    invocation = host.unit(f"lane-{name}.service")["InvocationID"]
    return host.path(f"/var/log/standin-systemd/{invocation}.log").read_text()


def test_a_switch_proves_it_and_every_start_of_this_boot_uses_that(host: LaneHost) -> None:
    host.lane("b", **REQUIRED)
    plan = host.json("lane", "switch", "b", "-n")
    assert (plan["refusals"], record(host)) == ([], None)
    assert any("will be proven by bytes once the cards are free" in n for n in plan["notes"])
    done = host.switch("b")
    assert done["outcome"] == "promoted", done["reasons"]
    made = record(host)
    assert made is not None
    assert (made["problem"], made["pairs"], made["all_reduce"]) == (None, 2, True)
    assert made["cards"] == CARDS
    assert MADE not in log(host, "b")  # by the switch, not once more by the unit
    assert "NCCL_P2P_DISABLE" not in environment(host, "b")
    status = host.json("lane", "status")
    assert (status["p2p"]["tier"], status["notices"]) == ("bytes", [])

    os.killpg(host.unit("lane-b.service")["MainPID"], signal.SIGKILL)
    wait_for(lambda: host.unit("lane-b.service")["NRestarts"] == 1, "a restart")
    wait_for(lambda: host.front() == 200, "the lane is back")
    assert record(host) == made

    host.boot()
    grant(host)
    host.start_front()
    assert host.run("lane", "resume").status == 0
    wait_for(lambda: host.front() == 200, "the lane after a boot")
    anew = record(host)
    assert anew is not None
    assert (anew["problem"], anew["boot_id"] != made["boot_id"]) == (None, True)
    assert MADE in log(host, "b")
    assert "NCCL_P2P_DISABLE" not in environment(host, "b")


def test_wrong_data_is_found_before_the_lane_starts(host: LaneHost) -> None:
    install(host, mirror="0-1")
    host.lane("b", **REQUIRED)
    done = host.switch("b")
    assert (done["status"], done["outcome"], host.front()) == (70, "rolled-back", 200)
    assert "wrong data arrives (GPU0 (0000:01:00.0) -> GPU1 (0000:02:00.0)" in done["reasons"][0]
    found = record(host)
    assert found is not None
    assert (found["is_fault"], host.unit("lane-b.service")["MainPID"]) == (True, 0)
    # from now on nothing is stopped for it, until somebody has looked
    refusal = host.json("lane", "switch", "b", "-n")["refusals"][0]
    assert (refusal["code"], "gpuguard doctor" in refusal["remedy"]) == ("lane-p2p-unproven", True)
    assert refused(host, "b") == ["lane-p2p-unproven"]
    install(host)
    host.run("verify", "--deep")  # the grant is unknown here, whatever the bytes say
    assert host.json("lane", "switch", "b", "-n")["refusals"] == []
    # a gate that is shut takes it away
    assert host.run("verify", "--gate").status != 0
    assert record(host) is None


def test_a_lane_that_prefers_it_starts_without(host: LaneHost) -> None:
    install(host, mirror="1-0")
    host.lane("b", **PREFERRED)
    done = host.switch("b")
    assert done["outcome"] == "promoted", done["reasons"]
    assert any("starts with P2P off (NCCL_P2P_DISABLE=1)" in note for note in done["notes"])
    assert any("wrong data arrives (GPU" in note for note in done["notes"])
    assert environment(host, "b")["NCCL_P2P_DISABLE"] == "1"
    assert MADE not in log(host, "b")
    assert [n["code"] for n in host.json("lane", "status")["notices"]] == ["lane-p2p-unproven"]
    install(host)
    host.run("verify", "--deep")
    notices = host.json("lane", "status")["notices"]
    assert [notice["code"] for notice in notices] == ["lane-p2p-off"]


@pytest.mark.parametrize("what", ["bindings", "NCCL"])
def test_without_the_tools_nothing_is_stopped(host: LaneHost, what: str) -> None:
    uninstall(host, what)
    host.lane("b", **REQUIRED)
    before = host.unit("lane-a.service")["MainPID"]
    done = host.switch("b")
    assert (done["status"], done["outcome"]) == (69, "refused")
    (refusal,) = done["refusals"]
    assert refusal["code"] == "lane-p2p-unproven"
    assert "cannot be made up for here" in refusal["message"]
    assert "gpuguard[deep]" in refusal["remedy"]
    assert host.unit("lane-a.service")["MainPID"] == before
    host.lane("b", **{**ON_CARDS, "requires": {"p2p": "required", "proof": "grant"}})
    assert host.switch("b")["outcome"] == "promoted"
    assert host.json("lane", "status")["p2p"]["tier"] == "grant"


def test_cards_that_are_not_free_prove_nothing(host: LaneHost) -> None:
    host.lane("b", **{**REQUIRED, "requires": {"p2p": "required", "proof": "bytes"}})
    assert host.switch("b")["outcome"] == "promoted"
    assert host.systemctl("stop", "lane-b.service").returncode == 0
    host.path("/run/gpuguard/proof-deep.json").unlink()
    host.pretend_cards(**{**FREE, "used": 9 << 30, "total": 32 << 30})
    said = host.run("lane", "prepare", "b")
    assert (said.status, record(host)) == (69, None)
    assert "none can be moved now: 0000:01:00.0 has 9216 MiB in use" in said.err


def test_a_hang_costs_its_limit_and_leaves_nobody_behind(host: LaneHost) -> None:
    install(host, hang="0-1")
    host.lane("b", **{**REQUIRED, "timeouts": {"prove": 5}})
    done = host.switch("b")
    assert (done["outcome"], host.front()) == ("rolled-back", 200)
    assert "not through within 5 s" in done["reasons"][0]
    found = record(host)
    assert found is not None
    assert (found["is_fault"], found["problem"] is None) == (False, False)
    assert children(host) == []


@pytest.mark.parametrize("who", ["switch", "prepare"])
def test_killed_while_bytes_move(host: LaneHost, who: str) -> None:
    host.lane("b", **REQUIRED)
    words = ("lane", "switch", "b")
    if who == "prepare":
        assert host.switch("b")["outcome"] == "promoted"
        assert host.systemctl("stop", "lane-b.service").returncode == 0
        host.path("/run/gpuguard/proof-deep.json").unlink()
        words = ("lane", "prepare", "b")
    install(host, hang="0-1")
    run = host.start(*words)
    wait_for(lambda: children(host), "the child that moves bytes")
    run.kill()
    run.wait()
    for child in children(host):
        os.kill(child, signal.SIGKILL)
    assert record(host) is None
    install(host)
    if who == "switch":
        done = host.json("lane", "resume")
        assert (done["outcome"], host.front()) == ("promoted", 200), done["reasons"]
    else:
        assert host.run("lane", "prepare", "b").status == 0
    made = record(host)
    assert made is not None
    assert made["problem"] is None


def test_records_that_others_could_have_written_are_not_believed(host: LaneHost) -> None:
    host.lane("b", **REQUIRED)
    host.run("verify", "--deep")
    assert host.json("lane", "switch", "b", "-n")["notes"] == []
    deep, gate = (host.path(f"/run/gpuguard/{name}.json") for name in ("proof-deep", "proof"))
    os.chown(deep, 65534, 65534)
    (note,) = host.json("lane", "switch", "b", "-n")["notes"]
    assert "will be proven" in note
    assert "is not believed: " in note
    gate.chmod(0o666)
    refusals = host.json("lane", "switch", "b", "-n")["refusals"]
    (said,) = [r["message"] for r in refusals if r["code"] == "lane-p2p-unproven"]
    assert "is not believed: " in said


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"STUB_NCCL_VIA": "P2P/CUMEM,SHM/direct/direct"}, "NCCL goes via P2P, SHM"),
        ({"STUB_NCCL_VIA": "-"}, "how NCCL connects the cards cannot be seen"),
        ({"NCCL_DEBUG": "INFO"}, None),
        ({}, None),
    ],
    ids=["mixed", "silent", "journal", "file"],
)
def test_the_transport_must_be_seen_to_be_p2p(
    host: LaneHost, env: dict[str, str], said: str | None
) -> None:
    word = {"p2p": "required", "proof": "grant"}
    host.lane("b", **{**ON_CARDS, "env": {**ON_CARDS["env"], **env}, "requires": word})
    done = host.switch("b")
    assert done["outcome"] == ("promoted" if said is None else "rolled-back"), done["reasons"]
    assert said is None or said in done["reasons"][0]


def children(host: LaneHost) -> list[int]:
    """Processes of this machine that move bytes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            is_ours = (folder / "root").readlink() == host.root
        except OSError:
            continue
        if is_ours and b"gpuguard.deep.child" in words and any(b'"pairs"' in w for w in words):
            found.append(int(folder.name))
    return found
