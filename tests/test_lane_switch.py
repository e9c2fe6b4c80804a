"""Switching between lanes of stub engines: the real program, the real proxy, real processes."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest

from gpuguard.serving.engine import Engine
from tests.lanekit import LaneHost, free_port, settle, wait_for

pytestmark = pytest.mark.slow


_B = {"args": {"kv-cache-dtype": "fp8"}}


@pytest.fixture
def two(shared_lane_host: LaneHost) -> LaneHost:
    """Lanes a and b behind the front; a serves."""
    return settle(shared_lane_host, a={}, b=_B)


@pytest.fixture
def fresh(lane_host: LaneHost) -> LaneHost:
    """As ``two``, on a machine of the test's own."""
    return settle(lane_host, a={}, b=_B)


def test_forward_and_back_behind_one_address(two: LaneHost) -> None:
    assert (two.front(), two.serving()) == (200, two.lane_id("a"))
    forward = two.switch("b")
    assert (forward["status"], forward["from"]) == (0, two.lane_id("a")), forward
    assert (two.front(), two.serving()) == (200, two.lane_id("b"))
    back = two.json("lane", "rollback")
    assert (back["status"], back["serving"]) == (0, two.lane_id("a")), back
    assert (two.front(), two.serving()) == (200, two.lane_id("a"))
    kinds = [(e["kind"], e["outcome"]) for e in two.history()[-2:]]
    assert kinds == [("switch", "promoted"), ("rollback", "promoted")]
    again = two.json("lane", "switch", "a")
    assert (again["status"], again["outcome"]) == (0, "nothing-to-do")


def test_lanes_of_different_ports_behind_the_same_address(two: LaneHost) -> None:
    two.lane("c", port=free_port(), model={"served_name": "other"})
    assert two.switch("c")["outcome"] == "promoted"
    status, _, body = two.ask(two.front_port)
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "other")


def test_while_no_lane_is_ready_the_front_says_when_to_come_back(lane_host: LaneHost) -> None:
    lane_host.start_front()
    status, headers, body = lane_host.ask(lane_host.front_port)
    assert (status, headers["retry-after"]) == (503, "30")
    assert json.loads(body)["error"]["code"] == 503


def test_requests_in_flight_are_answered_to_the_end(two: LaneHost) -> None:
    two.lane("slow", env={"STUB_TOKEN_SECONDS": "0.05"})
    assert two.switch("slow")["outcome"] == "promoted"
    answers = []

    def ask() -> None:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 40}
        answers.append(Engine(two.front_port).post("/v1/completions", body, timeout=60))

    client = threading.Thread(target=ask)
    client.start()
    engine = Engine(two.port)
    wait_for(lambda: "running{engine=\"0\",model_name=\"tiny\"} 1.0" in engine.get("/metrics").text,
             "the request")  # fmt: skip
    run = two.start("lane", "switch", "b")
    run.says("drain")
    wait_for(lambda: two.front() == 503, "no new requests")
    assert client.is_alive(), "the request was to be still in flight"
    client.join()
    assert run.wait().status == 0
    assert [(a.status, a.document["usage"]["completion_tokens"]) for a in answers] == [(200, 40)]
    assert two.front() == 200


def test_an_engine_that_dies_leaves_with_status_0_and_is_started_again(two: LaneHost) -> None:
    main = two.unit("lane-a.service")["MainPID"]
    children = two.command("ps", "-o", "pid=", "--ppid", str(main)).stdout.split()
    two.command("kill", "-9", children[0])
    wait_for(lambda: two.front() == 503, "the front notices")
    wait_for(lambda: two.front() == 200, "the lane is back")
    unit = two.unit("lane-a.service")
    assert (unit["NRestarts"], unit["MainPID"] != main) == (1, True)


def test_what_a_dry_run_says_is_all_it_does(two: LaneHost) -> None:
    two.lane("b", args={"kv-cache-dtype": "fp8_e5m2"})
    before, number = two.state("active"), len(two.history())
    planned = two.json("lane", "switch", "b", "--dry-run")
    assert (planned["status"], planned["outcome"]) == (0, "planned")
    assert (planned["from"], planned["to"]) == (two.lane_id("a"), two.lane_id("b"))
    assert not two.path(f"/var/lib/gpuguard/lanes/releases/{two.lane_id('b')}.json").exists()
    assert (two.state("active"), len(two.history()), two.front()) == (before, number, 200)
    two.lane("b", args={"load-format": "dummy"})
    refused = two.json("lane", "switch", "b", "--dry-run")
    assert (refused["status"], refused["refusals"][0]["code"]) == (69, "lane-dummy-weights")


def test_two_at_once(two: LaneHost) -> None:
    two.lane("slow", env={"STUB_START_SECONDS": "3"})
    run = two.start("lane", "switch", "slow")
    run.says("waiting for")
    second = two.run("lane", "switch", "b")
    assert (second.status, "[lane-busy]" in second.err) == (75, True)
    status = two.json("lane", "status")
    assert (status["switch"]["to"], status["switch"]["running"]) == (two.lane_id("slow"), True)
    assert run.wait().status == 0
    assert two.serving() == two.lane_id("slow")


def test_ctrl_c_leads_back(two: LaneHost) -> None:
    two.lane("slow", env={"STUB_START_SECONDS": "8"})
    run = two.start("lane", "switch", "slow")
    run.says("waiting for")
    run.kill(signal.SIGINT)
    said = run.wait()
    assert said.status == 70
    assert "journalctl -u lane-slow.service --since '20" in said.err
    assert (two.serving(), two.front()) == (two.lane_id("a"), 200)
    assert two.history()[-1]["outcome"] == "rolled-back"


def test_a_drained_lane_gets_traffic_again_by_its_name(two: LaneHost) -> None:
    assert two.run("lane", "drain").status == 0
    assert two.front() == 503
    said = two.run("lane", "switch", "a")
    assert (said.status, two.front()) == (0, 200), said.err
    assert "serves already" in said.out
    assert "runs already" in two.run("lane", "resume").out


def test_an_engine_that_hangs_does_not_count_as_serving(two: LaneHost) -> None:
    pid = str(two.unit("lane-a.service")["MainPID"])
    two.command("pkill", "-STOP", "-P", pid)
    two.command("kill", "-STOP", pid)
    said = two.run("lane", "switch", "a")
    two.command("pkill", "-CONT", "-P", pid)
    two.command("kill", "-CONT", pid)
    assert (said.status, "does not answer" in said.err) == (69, True), said.err
    assert two.run("lane", "switch", "a").status == 0


def test_the_eta_comes_from_the_history(two: LaneHost) -> None:
    two.lane("eta", env={"STUB_START_SECONDS": "2"}, timeouts={"first_start": 77})
    assert "no earlier start is known" in two.run("lane", "switch", "eta", "-n").out
    said = two.run("lane", "switch", "eta").err
    assert f"waiting for {two.lane_id('eta')} (no earlier start is known, at most 77 s)" in said
    assert f"gate      asking {two.lane_id('eta')} what is known" in said
    assert two.history()[-1]["starts"][0]["first"] is True
    assert two.switch("a")["outcome"] == "promoted"
    later = two.json("lane", "switch", "eta", "-n")
    assert later["first_start"] is False
    assert later["expected_start_seconds"] > 1


def test_a_lane_edited_while_it_serves_is_noticed_and_goes_on_as_it_was(two: LaneHost) -> None:
    before = two.lane_id("a")
    two.lane("a", args={"max-num-seqs": 2})
    status = two.json("lane", "status")
    assert (status["status"], status["active"]) == (1, before)
    assert [notice["code"] for notice in status["notices"]] == ["lane-edited"]
    assert two.switch("b")["outcome"] == "promoted"
    assert two.json("lane", "rollback")["serving"] == before  # as it was, not as the file says
    assert two.switch("a")["serving"] == two.lane_id("a")  # now it is taken over
    assert two.json("lane", "status")["notices"] == []


def test_a_switch_has_the_files_of_today_and_a_rollback_those_of_then(two: LaneHost) -> None:
    unit = two.path("/etc/systemd/system/lane-b.service")
    kept = two.path(f"/var/lib/gpuguard/lanes/releases/{two.lane_id('b')}.json")

    def older() -> None:  # as a gpuguard before this one would have made them
        assert "RestartSec=15" in kept.read_text()
        kept.write_text(kept.read_text().replace("RestartSec=15", "RestartSec=14"))

    assert two.switch("b")["outcome"] == "promoted"
    older()
    assert two.switch("a")["outcome"] == "promoted"
    assert two.json("lane", "rollback")["serving"] == two.lane_id("b")
    assert "RestartSec=14" in unit.read_text()
    assert two.switch("a")["outcome"] == "promoted"
    assert two.switch("b")["serving"] == two.lane_id("b")
    assert "RestartSec=15" in unit.read_text()
    assert two.json("lane", "status")["notices"] == []


def test_a_unit_that_somebody_edited_is_noticed(two: LaneHost) -> None:
    file = two.path("/etc/systemd/system/lane-a.service")
    file.write_text(file.read_text().replace("max-num-seqs 4", "max-num-seqs 400"))
    assert [n["code"] for n in two.json("lane", "status")["notices"]] == ["lane-unit-edited"]
    assert two.run("lane", "resume").status == 0
    assert two.json("lane", "status")["notices"] == []


def test_after_a_boot_the_active_lane_starts_by_itself(fresh: LaneHost) -> None:
    assert fresh.switch("b")["outcome"] == "promoted"
    fresh.boot()
    assert fresh.serving() is None
    fresh.start_front()
    assert fresh.run("lane", "resume").status == 0
    wait_for(lambda: fresh.front() == 200, "the lane is back")
    assert fresh.serving() == fresh.lane_id("b")
    assert fresh.json("lane", "status")["verdict"] == "ok"


def test_a_clock_that_was_wrong_by_years(fresh: LaneHost) -> None:
    for file in fresh.path("/var/lib/gpuguard/lanes").rglob("*.json*"):
        file.write_text(file.read_text().replace("202", "209"))  # all was written in the future
        os.utime(file, (4e9, 4e9))
    active = fresh.state("active")
    assert active is not None
    assert active["since"].startswith("209")
    assert fresh.switch("b")["outcome"] == "promoted"
    assert fresh.json("lane", "rollback")["outcome"] == "promoted"
    assert fresh.serving() == fresh.lane_id("a")


def test_the_remedy_of_a_lane_that_died_too_often_starts_it(fresh: LaneHost) -> None:
    """Three starts an hour are all that systemd gives it, a person's included."""
    unit = "lane-a.service"
    killed = {0}
    for _ in range(3):
        wait_for(lambda: fresh.unit(unit)["MainPID"] not in killed, "a start")
        main = fresh.unit(unit)["MainPID"]
        os.killpg(main, signal.SIGKILL)
        killed.add(main)
    wait_for(lambda: fresh.unit(unit)["ActiveState"] == "failed", "the limit")
    assert fresh.systemctl("start", unit).returncode != 0
    (down,) = fresh.json("lane", "status")["notices"]
    assert (down["code"], fresh.front()) == ("lane-down", 503)
    remedy = down["remedy"].rpartition("; ")[2].split()
    assert fresh.run(*remedy[1:]).status == 0
    wait_for(lambda: fresh.front() == 200, "the lane is back")
