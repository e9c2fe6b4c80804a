"""Draining before a maintenance window; lane files checked before they are in place."""

from __future__ import annotations

import threading

import pytest

from gpuguard.serving.engine import Engine
from tests.lanekit import LaneHost, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def serving(lane_host: LaneHost) -> LaneHost:
    """Lane a serves behind the front, slowly."""
    lane_host.lane("a", env={"STUB_TOKEN_SECONDS": "0.05"}, timeouts={"drain": 20})
    lane_host.start_front()
    assert lane_host.switch("a")["outcome"] == "promoted"
    assert lane_host.front() == 200
    return lane_host


def test_new_requests_are_turned_away_and_those_under_way_are_answered(serving: LaneHost) -> None:
    answers: list[int] = []

    def ask() -> None:
        body = {"model": "tiny", "prompt": "Count", "max_tokens": 40}
        answers.append(Engine(serving.port).post("/v1/completions", body).status)

    request = threading.Thread(target=ask)
    request.start()
    running = 'vllm:num_requests_running{engine="0",model_name="tiny"} 1.0'
    wait_for(lambda: running in serving.ask(serving.port, "/metrics")[2], "the request")
    done = serving.json("lane", "drain")
    request.join()
    assert (done["status"], done["lane_id"], done["notes"]) == (0, serving.lane_id("a"), [])
    assert answers == [200]
    status, headers, _ = serving.ask(serving.front_port)
    assert (status, headers["retry-after"]) == (503, "30")
    assert serving.ask(serving.port, "/health")[0] == 200, "the lane itself goes on running"


def test_resume_gives_it_traffic_again(serving: LaneHost) -> None:
    serving.json("lane", "drain")
    serving.json("lane", "drain")  # twice is once
    assert serving.front() == 503
    assert serving.json("lane", "resume")["active"] == serving.lane_id("a")
    wait_for(lambda: serving.front() == 200, "the front")


def test_without_a_lane_there_is_nothing_to_wait_for(lane_host: LaneHost) -> None:
    done = lane_host.json("lane", "drain")
    assert (done["status"], done["lane_id"], done["notes"]) == (0, None, [])


def test_files_are_checked_before_they_are_in_place(lane_host: LaneHost) -> None:
    folder = lane_host.path("/etc/gpuguard/lanes")
    names = []
    for name, other in (("a", "b"), ("b", "a")):
        lane_host.lane(name, fallback=[other])
        (folder / f"{name}.yaml").rename(folder / f"{name}.yaml.candidate")
        names.append(f"/etc/gpuguard/lanes/{name}.yaml.candidate")
    done = lane_host.json("lane", "validate", *names)
    assert (done["status"], done["valid"]) == (0, True), done
    alone = lane_host.json("lane", "validate", names[0])
    assert (alone["status"], alone["valid"]) == (78, False)
    problems = alone["lanes"][0]["problems"]
    assert [p["code"] for p in problems if p["severity"] == "error"] == ["lane-fallback-unknown"]
    assert lane_host.json("lane", "list")["lanes"] == []


def test_a_file_that_is_not_there_is_said(lane_host: LaneHost) -> None:
    said = lane_host.run("lane", "validate", "/etc/gpuguard/lanes/none.yaml")
    assert said.status == 78
    assert "[lane-missing]" in said.err
