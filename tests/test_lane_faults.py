"""Switches that meet a fault: what is said, what is written, and who serves afterwards."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from gpuguard.serving.engine import Engine
from tests.lane_outcomes import refused, rolled_back
from tests.lanekit import LaneHost, free_port, settle, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def served(shared_lane_host: LaneHost) -> LaneHost:
    """Lane a serves behind the front."""
    return settle(shared_lane_host, a={})


@pytest.fixture
def fresh(lane_host: LaneHost) -> LaneHost:
    """As ``served``, on a machine of the test's own."""
    return settle(lane_host, a={})


# --- refused before anything is stopped


def test_what_the_linter_refuses(served: LaneHost) -> None:
    served.lane("b", args={"load-format": "dummy", "shutdown-timeout": 0})
    assert refused(served, "b") == ["lane-dummy-weights", "lane-shutdown-timeout"]


def test_a_model_that_was_changed(served: LaneHost) -> None:
    made = served.json("lane", "manifest", "/srv/model")
    assert made["files"] == 2
    served.lane("b", model={"manifest_sha256": made["manifest_sha256"]})
    assert served.json("lane", "switch", "b", "-n")["refusals"] == []
    weights = served.path("/srv/model/weights.safetensors")
    weights.write_bytes(b"weightz")
    assert refused(served, "b") == ["lane-model-mismatch"]
    weights.write_bytes(b"weights")
    extra = served.path("/srv/model/modeling_tiny.py")
    extra.write_text("print('not in the manifest')")
    assert refused(served, "b") == ["lane-model-mismatch"]
    assert "modeling_tiny.py is not in the manifest" in served.history()[-1]["reasons"][0]
    extra.unlink()
    served.path("/srv/model/manifest.json").write_text("{}")
    assert refused(served, "b") == ["lane-model-mismatch"]


def test_an_engine_whose_account_cannot_read_the_model(served: LaneHost) -> None:
    served.lane("b", engine={"user": "nobody"})
    assert served.json("lane", "switch", "b", "-n")["refusals"] == []
    weights, folder = served.path("/srv/model/weights.safetensors"), served.path("/srv/model")
    weights.chmod(0o640)
    assert refused(served, "b") == ["lane-unreadable-for-engine"]
    said = served.history()[-1]["reasons"][0]
    assert "the account nobody cannot read /srv/model/weights.safetensors" in said
    weights.chmod(0o644)
    folder.chmod(0o700)
    assert refused(served, "b") == ["lane-unreadable-for-engine"]
    folder.chmod(0o755)
    program = served.path("/opt/vllm/bin/vllm")
    program.chmod(0o700)
    assert refused(served, "b") == ["lane-unreadable-for-engine"]
    assert "cannot run /opt/vllm/bin/vllm" in served.history()[-1]["reasons"][0]
    program.chmod(0o755)


def test_a_port_that_somebody_else_has(served: LaneHost) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        served.lane("b", port=other.getsockname()[1])
        assert refused(served, "b") == ["lane-port-taken"]


def test_no_room_for_a_snapshot(fresh: LaneHost) -> None:
    fresh.lane("b")
    folder = "/var/lib/gpuguard/lanes"
    small = fresh.command(
        "sh", "-c", f"cp -a {folder} /srv/kept && mount -t tmpfs -o size=512k none {folder} "
        f"&& cp -a /srv/kept/. {folder}",
    )  # fmt: skip
    assert small.returncode == 0, small.stderr
    assert refused(fresh, "b") == ["lane-disk-full"]
    said = fresh.run("lane", "switch", "b")
    assert (said.status, "[lane-disk-full]" in said.err) == (69, True), said.err


def test_a_disk_that_fills_up_on_the_way_keeps_no_lane_from_coming_back(fresh: LaneHost) -> None:
    fresh.lane("b")
    assert fresh.switch("b")["outcome"] == "promoted"
    assert fresh.switch("a")["outcome"] == "promoted"
    folder = "/var/lib/gpuguard/lanes"
    small = fresh.command(
        "sh", "-c", f"cp -a {folder} /srv/kept && mount -t tmpfs -o size=18m none {folder} "
        f"&& cp -a /srv/kept/. {folder}",
    )  # fmt: skip
    assert small.returncode == 0, small.stderr
    fresh.lane("bad", env={"STUB_START_SECONDS": "3", "STUB_ANSWER": "!"})
    run = fresh.start("lane", "switch", "bad")
    run.says("waiting for")
    fresh.command("dd", "if=/dev/zero", f"of={folder}/big", "bs=1M", "count=12")
    assert run.wait().status == 70
    assert (fresh.serving(), fresh.front()) == (fresh.lane_id("a"), 200)
    done = fresh.json("lane", "rollback")
    assert (done["status"], done["serving"]) == (0, fresh.lane_id("b")), done
    assert any("MiB free" in note for note in done["notes"])


def test_what_cannot_be_removed_takes_no_good_lane_down(fresh: LaneHost) -> None:
    for number in range(25):
        fresh.path(f"/var/lib/gpuguard/lanes/snapshots/{number}.json").mkdir(parents=True)
    fresh.lane("b")
    done = fresh.switch("b")
    assert (done["status"], fresh.serving(), fresh.front()) == (0, fresh.lane_id("b"), 200)
    assert any("could be removed" in note for note in done["notes"])


def test_a_record_that_was_moved_away_while_a_lane_serves(served: LaneHost) -> None:
    active = served.path("/var/lib/gpuguard/lanes/active.json")
    active.write_text("{")
    assert served.run("lane", "status").status != 0
    active.unlink()
    status = served.json("lane", "status")
    assert (status["status"], [n["code"] for n in status["notices"]]) == (1, ["lane-unrecorded"])
    served.lane("b")  # the same port: what runs there is ours, and is stopped
    assert served.switch("b")["outcome"] == "promoted"
    assert (served.serving(), served.front()) == (served.lane_id("b"), 200)
    assert served.unit("lane-a.service")["ActiveState"] == "inactive"


def test_without_systemd_nothing_is_begun(served: LaneHost) -> None:
    served.lane("b")
    tool = served.path("/opt/tools/systemctl")
    program = tool.read_text()
    tool.write_text("#!/bin/sh\necho 'Failed to connect to bus: Connection refused' >&2\nexit 1\n")
    said = served.run("lane", "switch", "b")
    tool.write_text(program)
    assert (said.status, served.state("switch")) == (69, None), said.err
    assert "Failed to connect to bus" in said.err
    assert "lane-systemd-silent" in said.err
    assert served.front() == 200


def test_a_proxy_that_dies_in_the_middle(served: LaneHost) -> None:
    served.lane("b", env={"STUB_START_SECONDS": "3"})
    run = served.start("lane", "switch", "b")
    run.says("waiting for")
    served.stop_front()
    assert run.wait().status == 69
    assert served.serving() == served.lane_id("b")
    served.start_front()
    wait_for(lambda: served.front() == 200, "its file leads to the new lane")


def test_a_proxy_that_is_down(served: LaneHost) -> None:
    served.lane("b")
    served.stop_front()
    before = served.serving()
    done = served.switch("b")
    assert (done["status"], [r["code"] for r in done["refusals"]]) == (69, ["front-down"])
    assert served.serving() == before
    status = served.json("lane", "status")
    assert (status["status"], [n["code"] for n in status["notices"]]) == (1, ["front-down"])
    served.start_front()
    wait_for(lambda: served.front() == 200, "traffic as before")


def test_a_rollback_does_not_wait_for_the_proxy(served: LaneHost) -> None:
    served.lane("b")
    assert served.switch("b")["outcome"] == "promoted"
    served.stop_front()
    done = served.json("lane", "rollback")
    assert (done["status"], done["outcome"]) == (69, "promoted")  # it serves, nobody reaches it
    assert served.serving() == served.lane_id("a")
    served.start_front()  # the file is right: it goes where the lane is
    wait_for(lambda: served.front() == 200, "traffic to the lane that serves")


# --- stopped, and back


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"env": {"STUB_NEVER_READY": "1"}, "timeouts": {"first_start": 3}}, "not ready after 3 s"),
        (
            {"env": {"STUB_NCCL_HANG": "1"}, "timeouts": {"no_progress": 1}},
            "P2P is suspected",
        ),
        (
            {"env": {"STUB_FATAL": "No available memory for the cache blocks"}},
            "the engine gave up: ",
        ),
        ({"env": {"STUB_MAX_MODEL_LEN": "1024"}}, "max_model_len is 1024, the lane says 2048"),
        ({"env": {"STUB_MODEL": "other"}}, "it serves other, not tiny"),
        (
            {"env": {"STUB_KV_TOKENS": "1041901"}, "expect": {"kv_tokens": 1944081}},
            "the KV pool has 1041901 tokens, 1944081 are expected",
        ),
        ({"expect": {"version": "0.33.0"}}, "the engine is 0.32.0, not 0.33.0"),
        ({"env": {"STUB_ANSWER": "!"}}, "gate fail: completion: one character without end"),
        ({"env": {"STUB_LOGPROB": "nan"}}, "gate fail: logprobs"),
        (
            {"gate": {"canary": [{"prompt": "The capital of France is", "expect": "Berlin"}]}},
            "gate fail: canary 1: answered ' Paris",
        ),
        ({"env": {"STUB_STATUS": "429"}}, "gate inconclusive: completion: HTTP 429"),
        ({"env": {"STUB_STATUS": "500"}}, "gate fail: completion: HTTP 500"),
        (
            {"env": {"STUB_TOKEN_SECONDS": "0.01"}, "expect": {"decode_tok_s_min": 5000}},
            "at least 5000 are expected",
        ),
    ],
    ids=[
        "never-ready", "nccl-hang", "fatal", "max-model-len", "other-model", "kv-pool", "version",
        "degenerate", "nan", "canary", "inconclusive", "error", "slow",
    ],
)  # fmt: skip
def test_a_lane_that_is_not_good_does_not_stay(
    served: LaneHost, changes: dict[str, Any], why: str
) -> None:
    changes.setdefault("timeouts", {})
    if "first_start" in changes["timeouts"]:
        changes["env"] = {**changes["env"], "VLLM_ENGINE_READY_TIMEOUT_S": "2"}
    served.lane("b", **changes)
    assert why in rolled_back(served, "b")


def test_both_lanes_fail_then_the_fallback(served: LaneHost) -> None:
    served.lane("c")
    served.lane("b", env={"STUB_FATAL": "Engine core initialization failed"}, fallback=["c"])
    served.path("/srv/model/config.json").unlink()  # a's start needs nothing of it, yet
    break_lane_a(served)
    done = served.switch("b")
    assert (done["status"], done["outcome"]) == (70, "fell-back"), done
    assert (served.serving(), served.front()) == (served.lane_id("c"), 200)


def test_everything_fails_and_that_is_said_honestly(served: LaneHost) -> None:
    served.lane("b", env={"STUB_FATAL": "Engine core initialization failed"})
    break_lane_a(served)
    said = served.run("lane", "switch", "b")
    assert (said.status, "NO LANE SERVES" in said.err) == (71, True), said.err
    assert (served.serving(), served.front()) == (None, 503)
    entry = served.history()[-1]
    assert (entry["outcome"], entry["serving"], len(entry["reasons"])) == ("failed", None, 2)
    status = served.json("lane", "status")
    assert (status["verdict"], status["notices"][0]["code"]) == ("critical", "lane-none-active")
    mend_lane_a(served)
    assert served.json("lane", "rollback")["status"] == 0
    assert (served.serving(), served.front()) == (served.lane_id("a"), 200)


def test_the_very_first_switch_fails(lane_host: LaneHost) -> None:
    assert lane_host.json("lane", "status")["status"] == 0  # nobody has asked for anything yet
    lane_host.lane("a", env={"STUB_FATAL": "Engine core initialization failed"})
    assert lane_host.switch("a")["status"] == 71
    status = lane_host.json("lane", "status")
    assert (status["status"], [n["code"] for n in status["notices"]]) == (1, ["lane-none-active"])


def break_lane_a(host: LaneHost) -> None:
    """Its unit's engine can be started no more: from now on each start ends at once."""
    host.path("/etc/systemd/system/lane-a.service.d/broken.conf").write_text(
        "[Service]\nEnvironment=STUB_FATAL=broken\n"
    )
    assert host.systemctl("daemon-reload").returncode == 0


def mend_lane_a(host: LaneHost) -> None:
    host.path("/etc/systemd/system/lane-a.service.d/broken.conf").unlink()
    assert host.systemctl("daemon-reload").returncode == 0


def test_an_engine_that_does_not_stop_is_killed(served: LaneHost) -> None:
    served.lane("stubborn", args={"shutdown-timeout": 1}, timeouts={"stop": 2, "drain": 0},
                env={"STUB_TOKEN_SECONDS": "0.05"})  # fmt: skip
    drop_in = served.path("/etc/systemd/system/lane-stubborn.service.d/fast.conf")
    drop_in.write_text("[Service]\nRestartSec=0.1\nTimeoutStopSec=2\n")
    served.lane("b")
    assert served.switch("stubborn")["outcome"] == "promoted"
    body = {"model": "tiny", "prompt": "x", "max_tokens": 900}
    client = threading.Thread(
        target=lambda: Engine(served.port).post("/v1/completions", body, timeout=60)
    )
    client.start()
    engine = Engine(served.port)
    wait_for(lambda: 'running{engine="0",model_name="tiny"} 1.0' in engine.get("/metrics").text,
             "the request")  # fmt: skip
    done = served.switch("b")
    client.join()
    assert (done["status"], served.serving()) == (0, served.lane_id("b")), done
    assert any("still had requests" in note for note in done["notes"])


# --- what is not a lane's turn


def test_a_lane_that_nobody_chose_does_not_start(served: LaneHost) -> None:
    served.lane("b", port=free_port())
    assert served.switch("b")["outcome"] == "promoted"
    started = served.systemctl("start", "lane-a.service")
    assert started.returncode != 0
    assert served.serving() == served.lane_id("b")
    log = next(served.path("/var/log/standin-systemd").glob(
        f"{served.unit('lane-a.service')['InvocationID']}.log")).read_text()  # fmt: skip
    assert "[lane-not-active]" in log


def test_unknown_lanes_and_broken_files(lane_host: LaneHost) -> None:
    said = lane_host.run("lane", "switch", "nope")
    assert (said.status, "[lane-missing]" in said.err) == (78, True)
    lane_host.lane("a")
    file = lane_host.path("/etc/gpuguard/lanes/a.yaml")
    file.write_text(file.read_text() + "surprise: 1\nport: 80\n")
    said = lane_host.run("lane", "switch", "a")
    assert (said.status, "[lane-invalid]" in said.err) == (78, True)
    assert said.err.count("\n  | ") >= 1
    file.chmod(0o666)
    assert "[lane-untrusted]" in lane_host.run("lane", "validate", "a").err
    none = lane_host.run("lane", "rollback")
    assert (none.status, "[lane-no-previous]" in none.err) == (69, True)
