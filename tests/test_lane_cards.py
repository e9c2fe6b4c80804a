"""Lanes that take cards: their memory, the driver, and P2P."""

from __future__ import annotations

import pytest

from tests.lane_outcomes import environment, refused
from tests.lanekit import LaneHost, settle, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def fresh(lane_host: LaneHost) -> LaneHost:
    """As ``served``, on a machine of the test's own."""
    return settle(lane_host, a={})


def test_cards_are_wanted_and_no_driver_is_loaded(fresh: LaneHost) -> None:
    fresh.lane("b", engine={"gpus": "all"})
    assert "lane-driver-missing" in refused(fresh, "b")


# --- cards


def test_memory_that_does_not_come_back(lane_host: LaneHost) -> None:
    host = lane_host
    host.pretend_bus(1)
    host.pretend_driver()
    host.pretend_cards(used=300 << 20)
    host.lane("a", engine={"gpus": "all"})
    host.lane("b", engine={"gpus": "all"})
    host.start_front()
    assert host.switch("a")["outcome"] == "promoted"
    host.pretend_cards(used=9 << 30)
    done = host.switch("b")
    assert (done["status"], done["outcome"]) == (71, "failed"), done
    assert "memory is not back: 0000:01:00.0 has 9216 MiB in use, at most 812" in done["reasons"][0]
    assert (host.serving(), host.front()) == (None, 503)
    host.pretend_cards(used=9 << 30, processes=[4711])
    assert "(processes on it: 4711)" in host.json("lane", "rollback")["reasons"][0]
    host.pretend_cards(used=300 << 20, processes=[4711])  # a display, for one
    assert host.json("lane", "rollback")["status"] == 0


def test_without_nvml_that_is_said(lane_host: LaneHost) -> None:
    lane_host.pretend_bus(1)
    lane_host.pretend_driver()
    lane_host.lane("a", engine={"gpus": "all"})
    done = lane_host.switch("a")
    assert done["outcome"] == "promoted"
    assert any("memory is free is not known" in note for note in done["notes"])


def test_a_driver_that_waits_for_a_reboot(fresh: LaneHost) -> None:
    fresh.pretend_bus(1)
    fresh.pretend_driver()
    fresh.path("/var/lib/dpkg").mkdir(parents=True)
    fresh.path("/var/lib/dpkg/status").write_text(
        "Package: libnvidia-ml1\nStatus: install ok installed\nArchitecture: amd64\n"
        "Version: 580.99.01-1\n"
    )
    fresh.lane("b", engine={"gpus": "all"})
    assert refused(fresh, "b") == ["lane-reboot-pending"]


# --- P2P


def test_p2p_that_is_required_needs_a_proof_of_this_boot(fresh: LaneHost) -> None:
    fresh.pretend_bus(4)
    fresh.pretend_driver()
    cards = {"engine": {"gpus": "all"}, "requires": {"p2p": "required", "proof": "grant"}}
    fresh.lane("b", **cards)
    assert refused(fresh, "b") == ["lane-p2p-unproven"]
    fresh.prove(kernel="another")
    assert refused(fresh, "b") == ["lane-p2p-unproven"]
    fresh.prove(boot_id="another")
    assert refused(fresh, "b") == ["lane-p2p-unproven"]
    fresh.prove()
    assert fresh.switch("b")["outcome"] == "promoted"
    assert "NCCL_P2P_DISABLE" not in environment(fresh, "b")


def test_cards_without_a_grant_between_all_of_them_are_no_ground_for_a_lane(
    fresh: LaneHost,
) -> None:
    fresh.pretend_bus(4)
    fresh.pretend_driver()
    fresh.prove(pairs=4, visible=4, together=2)  # p2p.groups: two and two
    wants = {"engine": {"gpus": "all"}, "requires": {"p2p": "required", "proof": "grant"}}
    for flag in ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"):
        fresh.lane("b", **wants, args={flag: 4, "disable-custom-all-reduce": True})
        assert refused(fresh, "b") == ["lane-p2p-unproven"]
    fresh.lane("b", **wants, args={"tensor-parallel-size": 2, "disable-custom-all-reduce": True})
    assert fresh.switch("b")["outcome"] == "promoted"
    assert environment(fresh, "b")["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_p2p_that_is_preferred_is_off_without_a_proof(fresh: LaneHost) -> None:
    fresh.pretend_bus(4)
    fresh.pretend_driver()
    fresh.lane("b", engine={"gpus": "all"}, requires={"p2p": "preferred", "proof": "grant"})
    done = fresh.switch("b")
    assert done["outcome"] == "promoted"
    assert any("starts with P2P off (NCCL_P2P_DISABLE=1)" in note for note in done["notes"])
    assert environment(fresh, "b")["NCCL_P2P_DISABLE"] == "1"
    assert [n["code"] for n in fresh.json("lane", "status")["notices"]] == ["lane-p2p-unproven"]


def test_after_a_boot_the_policy_decides_anew(fresh: LaneHost) -> None:
    fresh.pretend_driver()
    fresh.lane("b", engine={"gpus": "all"}, requires={"p2p": "preferred", "proof": "grant"})
    fresh.prove()
    assert fresh.switch("b")["outcome"] == "promoted"
    assert "NCCL_P2P_DISABLE" not in environment(fresh, "b")
    fresh.boot()
    fresh.start_front()
    assert fresh.run("lane", "resume").status == 0
    wait_for(lambda: fresh.front() == 200, "the lane is back")
    assert environment(fresh, "b")["NCCL_P2P_DISABLE"] == "1"


def test_after_a_boot_without_a_proof_a_lane_that_requires_it_stays_down(fresh: LaneHost) -> None:
    fresh.pretend_driver()
    fresh.lane("b", engine={"gpus": "all"}, requires={"p2p": "required", "proof": "grant"})
    fresh.prove()
    assert fresh.switch("b")["outcome"] == "promoted"
    fresh.boot()
    fresh.start_front()
    assert fresh.run("lane", "resume").status == 0
    wait_for(lambda: fresh.unit("lane-b.service").get("ActiveState") == "failed", "no start")
    assert fresh.front() == 503
    codes = [n["code"] for n in fresh.json("lane", "status")["notices"]]
    assert codes == ["lane-down", "lane-p2p-unproven"]


def test_the_p2p_cache_of_another_driver_is_moved_aside(fresh: LaneHost) -> None:
    fresh.pretend_driver()
    fresh.lane("b", engine={"gpus": "all"}, requires={"p2p": "preferred", "proof": "grant"})
    fresh.prove()
    assert fresh.switch("b")["outcome"] == "promoted"
    folder = fresh.path(f"/var/cache/gpuguard/lanes/{fresh.lane_id('b')}")
    cache = folder / "gpu_p2p_access_cache_for_0,1,2,3.json"
    cache.write_text("{}")
    assert fresh.switch("a")["outcome"] == "promoted"
    assert fresh.switch("b")["outcome"] == "promoted"
    assert cache.exists()  # nothing has changed
    assert fresh.switch("a")["outcome"] == "promoted"
    fresh.prove(cards=["GPU-0", "GPU-1", "GPU-2", "GPU-9"])
    assert fresh.switch("b")["outcome"] == "promoted"
    assert not cache.exists()
    assert len(list(folder.glob("gpu_p2p_access_cache_for_*.outdated-*"))) == 1
