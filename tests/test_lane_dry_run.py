"""A dry run says what the switch itself would meet: another one, and engines that are not there."""

from __future__ import annotations

import fcntl

import pytest

from gpuguard.core.facts import DriverFacts
from gpuguard.host import LocalHost
from gpuguard.serving import store
from gpuguard.serving.machine import Step, Switch
from gpuguard.serving.p2p_policy import P2pDecision, Tier
from gpuguard.serving.preflight import PreflightFacts, image_missing, refusals
from tests.lanekit import LaneHost
from tests.test_lane_lint import IMAGE, make_lane

LOCK = "/var/lib/gpuguard/lanes/lock"


def planned(host: LaneHost, *words: str) -> tuple[int, list[str], str]:
    """Exit status, codes of the refusals, and the remedies."""
    done = host.json("lane", *words, "-n")
    refused = done["refusals"]
    remedies = " ".join(one["remedy"] for one in refused)
    return done["status"], [one["code"] for one in refused], remedies


@pytest.mark.slow
def test_another_switch_is_in_the_way(lane_host: LaneHost) -> None:
    lane_host.lane("a")
    assert planned(lane_host, "switch", "a") == (0, [], "")
    lock = lane_host.path(LOCK)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        busy = (69, ["lane-busy"], "gpuguard lane status shows how far it is")
        assert planned(lane_host, "switch", "a") == busy
        said = lane_host.run("lane", "switch", "-n", "a")
        assert (said.status, "refused: another lane switch is under way" in said.out) == (69, True)
    assert planned(lane_host, "switch", "a") == (0, [], "")


@pytest.mark.slow
def test_an_interrupted_switch_comes_first(lane_host: LaneHost) -> None:
    lane_host.lane("a")
    new = lane_host.lane_id("a")
    switch = Switch(
        switch_id="1", kind="switch", started="then", boot_id="b", new=new, old=None,
        step=Step.READY,
    )  # fmt: skip
    store.write_switch(LocalHost(lane_host.root), switch)
    status, codes, remedy = planned(lane_host, "switch", "a")
    assert (status, codes) == (69, ["lane-switch-interrupted"])
    assert "gpuguard lane resume" in remedy
    assert store.read_switch(LocalHost(lane_host.root)) == switch, "only looked"


@pytest.mark.parametrize(
    ("backend", "problem", "first", "last"),
    [
        ("quadlet", "podman is not installed", "install podman 4.4", f"then: podman pull {IMAGE}"),
        ("compose", "docker is not installed", "install docker", f"then: docker pull {IMAGE}"),
        ("quadlet", image_missing(IMAGE), "podman pull", f"podman pull {IMAGE}"),
        ("compose", image_missing(IMAGE), "docker pull", f"docker pull {IMAGE}"),
    ],
)
def test_an_image_is_pulled_once_there_is_an_engine_for_it(
    backend: str, problem: str, first: str, last: str
) -> None:
    lane = make_lane(engine={"backend": backend, "gpus": "none"}, requires={"p2p": "none"})
    facts = PreflightFacts(
        lane=lane, problems=(), driver=DriverFacts(), engine=problem,
        p2p=P2pDecision(tier=Tier.NONE),
    )  # fmt: skip
    (refusal,) = refusals(facts)
    assert refusal.code == "lane-engine-missing"
    assert (refusal.remedy.startswith(first), refusal.remedy.endswith(last)) == (True, True)
