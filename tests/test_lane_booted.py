"""Lanes under a real systemd, behind the real gate: forward, back, crashes, boots.

The engine is the stub; systemd, the journal, HAProxy and the gate with its proof are real. The
tests are stages of one story.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.booted import Machine
from tests.booted_roots import PROGRAM, RELEASES
from tests.booted_story import story_machine
from tests.realroot import REPO, Lab, cache_dir, chroot, mounted

pytestmark = pytest.mark.slow
_FRONT = "127.0.0.1:8000"
RECORD = "/var/lib/gpuguard/lanes/switch.json"
RESUME = "gpuguard-lane-resume.service"
_ASK = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print(0)
"""
_FETCH = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())
"""
_CARDS = {"engine": {"gpus": "all"}, "args": {"tensor-parallel-size": 4},
          "requires": {"p2p": "required", "proof": "grant"}}  # fmt: skip


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Patched and proven; two lanes, and the front."""
    for machine in story_machine(RELEASES[0], tmp_path_factory.mktemp("lanes")):
        quick = machine.path("/etc/gpuguard/gpuguard.d/gate.yaml")
        quick.parent.mkdir(exist_ok=True)
        quick.write_text("gate: {wait_seconds: 2}\n")
        assert machine.gpuguard("setup").returncode == 0
        assert machine.gpuguard("rebuild").returncode == 0
        add_engine(machine.root)
        machine.reboot()
        add_haproxy(machine)
        write_lane(machine, "a")
        write_lane(machine, "b", **_CARDS)
        assert machine.gpuguard("lane", "setup").returncode == 0
        machine.systemctl("daemon-reload")
        machine.systemctl("start", "gpuguard-front.service", "gpuguard-lane-resume.path")
        yield machine


def add_engine(root: Path) -> None:
    """The stub, where a virtual environment of vLLM would be, and an account for it."""
    program = root / "opt/vllm/bin/vllm"
    program.parent.mkdir(parents=True)
    stub = (REPO / "tests/stub_vllm.py").read_text()
    program.write_text(f"#!/usr/bin/python3\n{stub}")
    program.chmod(0o755)
    golden = program.parent / "golden"
    golden.mkdir()
    shutil.copy(REPO / "tests/golden/vllm-0.32.0-metrics.txt", golden)
    (root / "srv/model").mkdir(parents=True)
    (root / "srv/model/weights.safetensors").write_bytes(b"weights")
    with mounted(root):
        chroot(root, "useradd", "--system", "vllm")


def add_haproxy(system: Machine) -> None:
    """The distribution's package and what it needs, downloaded once."""
    suite = system.base.debian.suite
    lab = Lab(cache_dir() / f"apt-{suite}", release=suite)
    status = system.root / "var/lib/dpkg/status"
    words = ("-o", f"Dir::State::status={status}", "--no-install-recommends", "-qy", "install")
    try:
        lab.apt(*words, "--download-only", "haproxy")
    except subprocess.CalledProcessError:  # lists that are days old name files that are gone
        lab.update()
        lab.apt(*words, "--download-only", "haproxy")
    planned = re.findall(r"^Inst (\S+) \((\S+) ", lab.apt(*words, "-s", "haproxy"), re.MULTILINE)
    folder = system.live_path("/srv/debs")
    folder.mkdir()
    for name, version in planned:
        pattern = f"{name}_{version.replace(':', '%3a')}_*.deb"
        shutil.copy(next((lab.folder / "cache/archives").glob(pattern)), folder)
    system.run("sh", "-c", "dpkg -i /srv/debs/*.deb", timeout=120)


def write_lane(system: Machine, name: str, **changes: Any) -> None:
    lane: dict[str, Any] = {
        "name": name,
        "engine": {"backend": "venv", "venv": "/opt/vllm", "gpus": "none"},
        "model": {"path": "/srv/model", "served_name": "tiny"},
        "args": {"max-model-len": 2048, "shutdown-timeout": 5},
        "env": {"VLLM_ENGINE_READY_TIMEOUT_S": 40},
        "timeouts": {"first_start": 60, "start": 60, "stop": 10, "drain": 5, "memory": 0},
    }
    for key, value in changes.items():
        lane[key] = {**lane[key], **value} if key in lane else value
    file = system.live_path(f"/etc/gpuguard/lanes/{name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(lane))


def lane(system: Machine, *words: str) -> dict[str, Any]:
    done = system.gpuguard("--json", "lane", *words)
    assert done.stdout, done.stderr
    return {"status": done.returncode, **json.loads(done.stdout)}


def front(system: Machine) -> int:
    url = f"http://{_FRONT}/v1/models"
    return int(system.run("/usr/bin/python3", "-c", _ASK, url).stdout)


def is_active(system: Machine, name: str) -> bool:
    return system.systemctl("is-active", f"lane-{name}.service", check=False) == "active"


def environment(system: Machine, name: str) -> str:
    pid = system.show(f"lane-{name}.service", "MainPID")
    return system.run("cat", f"/proc/{pid}/environ").stdout


def test_a_lane_that_requires_p2p_starts_behind_an_open_gate(system: Machine) -> None:
    assert front(system) == 503
    system.systemctl("start", "gpuguard-verify.service")
    done = lane(system, "switch", "b")
    assert (done["status"], done["outcome"], front(system)) == (0, "promoted", 200), str(
        done["reasons"]
    )
    assert "NCCL_P2P_DISABLE" not in environment(system, "b")
    assert system.show("lane-b.service", "User") == "vllm"


def test_without_the_tools_bytes_are_refused_before_anything_stops(system: Machine) -> None:
    write_lane(system, "proven", **{**_CARDS, "requires": {"p2p": "required"}})
    refused = lane(system, "switch", "proven")
    assert (refused["status"], refused["outcome"], front(system)) == (69, "refused", 200)
    (refusal,) = refused["refusals"]
    assert (refusal["code"], "gpuguard[deep]" in refusal["remedy"]) == ("lane-p2p-unproven", True)
    assert "cannot be made up for here" in refusal["message"]
    assert lane(system, "status")["p2p"]["tier"] == "grant"


def test_forward_and_back(system: Machine) -> None:
    done = lane(system, "switch", "a")
    assert (done["status"], is_active(system, "a"), is_active(system, "b")) == (0, True, False)
    back = lane(system, "rollback")
    assert (back["status"], is_active(system, "a"), is_active(system, "b")) == (0, False, True)
    assert front(system) == 200
    assert lane(system, "status")["verdict"] == "ok"


def seen_by_nobody(system: Machine, *words: str) -> dict[str, Any]:
    """What an ordinary account is told."""
    done = system.run(PROGRAM, "--json", *words, check=False, user="nobody")
    assert done.stdout, done.stderr
    return {"status": done.returncode, **json.loads(done.stdout)}


def codes(seen: dict[str, Any]) -> list[str]:
    return [notice["code"] for notice in seen["notices"]]


def test_what_an_ordinary_account_may_not_look_at_is_unknown_to_it(system: Machine) -> None:
    seen = seen_by_nobody(system, "lane", "status")
    assert (seen["status"], seen["verdict"]) == (3, "unknown"), seen
    assert codes(seen) == ["lane-unknown", "front-unknown"]
    assert (seen["active"].rpartition("-")[0], seen["ready"]) == ("b", True)
    assert seen["front"]["open"] is None
    said = system.run(PROGRAM, "lane", "status", check=False, user="nobody").stdout
    assert "not ready" not in said
    assert "503" not in said
    assert seen_by_nobody(system, "lane", "switch", "a", "-n")["error"]["code"] == "front-unknown"


def test_what_an_ordinary_account_can_see_is_told(system: Machine) -> None:
    system.systemctl("stop", "lane-b.service", "gpuguard-front.service")
    seen = seen_by_nobody(system, "lane", "status")
    assert (seen["status"], seen["ready"]) == (1, False)
    assert codes(seen) == ["lane-unknown", "lane-down", "front-down"]
    system.systemctl("start", "gpuguard-front.service")
    assert lane(system, "resume")["status"] == 0
    system.wait_for(lambda: front(system) == 200, 30, "the lane")


def metrics(system: Machine) -> dict[str, float]:
    """Of the daemon as it is confined, those of lanes without labels."""
    text = system.run("/usr/bin/python3", "-c", _FETCH, "http://127.0.0.1:9838/metrics").stdout
    found = re.findall(r"^(gpuguard_lane_\w+) (\S+)$", text, re.MULTILINE)
    return {name.removeprefix("gpuguard_lane_"): float(number) for name, number in found}


def test_the_daemon_sees_the_lane(system: Machine) -> None:
    system.wait_for(lambda: metrics(system).get("ready") == 1, 90, "a look")
    seen = metrics(system)
    assert (seen["active"], seen["switching"]) == (1, 0)
    assert (seen["p2p_wanted"], seen["p2p_on"]) == (1, 1)


def test_running_the_gate_again_does_not_stop_the_lane(system: Machine) -> None:
    before = system.show("lane-b.service", "MainPID")
    system.systemctl("restart", "gpuguard-verify.service")
    assert (system.show("lane-b.service", "MainPID"), front(system)) == (before, 200)


def test_a_lane_that_cannot_start(system: Machine) -> None:
    write_lane(system, "bad", env={"STUB_FATAL": "Engine core initialization failed"})
    done = lane(system, "switch", "bad")
    assert (done["status"], done["outcome"], front(system)) == (70, "rolled-back", 200), str(
        done["reasons"]
    )
    assert "the engine gave up: " in done["reasons"][0]


def test_an_engine_that_dies_is_started_again(system: Machine) -> None:
    drop_in = system.live_path("/etc/systemd/system/lane-b.service.d/quick.conf")
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nRestartSec=1\n")
    system.systemctl("daemon-reload")
    main = system.show("lane-b.service", "MainPID")
    system.run("pkill", "-9", "-P", main)
    system.wait_for(lambda: system.show("lane-b.service", "NRestarts") == "1", 30, "a restart")
    system.wait_for(lambda: front(system) == 200, 30, "the lane")


def test_after_a_reboot_it_serves_by_itself_behind_the_gate(system: Machine) -> None:
    system.reboot()
    system.wait_for(lambda: front(system) == 200, 60, "the lane")
    assert is_active(system, "b")
    assert "NCCL_P2P_DISABLE" not in environment(system, "b")
    assert "ordering cycle" not in system.journal()
    gate = int(system.show("gpuguard-verify.service", "ActiveEnterTimestampMonotonic"))
    assert gate < int(system.show("lane-b.service", "ExecMainStartTimestampMonotonic"))


def test_power_loss_in_the_middle_of_a_switch(system: Machine) -> None:
    write_lane(system, "slow", env={"STUB_START_SECONDS": "600"},
               timeouts={"first_start": 900, "stop": 10})  # fmt: skip
    run = system.start("/opt/gpuguard/bin/gpuguard", "lane", "switch", "slow")
    record = system.path(RECORD)
    system.wait_for(lambda: record.exists() and '"ready"' in record.read_text(), 60, "the step")
    system.cut_power()
    run.kill()
    run.communicate()
    system.boot(system.base.old)
    system.wait_for(lambda: front(system) == 200, 120, "the lane before")
    assert is_active(system, "b")
    entry = lane(system, "history")["switches"][-1]
    assert (entry["outcome"], entry["serving"]) == ("rolled-back", entry["from"]), entry["reasons"]
    assert not record.exists()


def begin(system: Machine, name: str) -> None:
    """A switch, until it waits for the lane; nobody waits for its end."""
    system.start("/opt/gpuguard/bin/gpuguard", "lane", "switch", name)
    record = system.path(RECORD)
    system.wait_for(lambda: record.exists() and '"ready"' in record.read_text(), 60, "the step")


def kill_switch(system: Machine, name: str) -> None:
    system.run("pkill", "-9", "-f", f"gpuguard lane switch {name}$")


def settled(system: Machine) -> dict[str, Any]:
    """The last entry of the history, once no switch is recorded and nobody is at work on one."""
    system.wait_for(
        lambda: not system.path(RECORD).exists()
        and system.show(RESUME, "ActiveState") == "inactive", 120, "the end of the switch",
    )  # fmt: skip
    assert system.show("gpuguard-lane-resume.path", "SubState") == "waiting"
    return dict(lane(system, "history")["switches"][-1])


def test_a_switch_whose_process_is_killed_is_finished_by_itself(system: Machine) -> None:
    quick = system.live_path(f"/etc/systemd/system/{RESUME}.d/quick.conf")
    quick.parent.mkdir(exist_ok=True)
    quick.write_text("[Service]\nRestartSec=2\n")
    system.systemctl("daemon-reload")
    write_lane(system, "late", env={"STUB_START_SECONDS": "8"})
    begin(system, "late")
    kill_switch(system, "late")
    entry = settled(system)
    assert (entry["outcome"], entry["serving"], front(system)) == ("promoted", entry["to"], 200)


def test_killed_a_second_time_the_lane_before_serves_again(system: Machine) -> None:
    begin(system, "slow")
    kill_switch(system, "slow")
    system.wait_for(
        lambda: "waiting for slow" in system.journal("-u", RESUME), 60, "somebody who goes on"
    )
    system.systemctl("kill", "-s", "KILL", RESUME)
    entry = settled(system)
    assert (entry["outcome"], entry["serving"]) == ("rolled-back", entry["from"])
    assert "interrupted again" in " ".join(entry["reasons"])
    assert (is_active(system, "late"), is_active(system, "slow"), front(system)) == (
        True, False, 200,
    )  # fmt: skip


def test_who_waits_for_a_switch_does_not_disturb_it(system: Machine) -> None:
    begin(system, "slow")
    system.wait_for(lambda: system.show(RESUME, "ActiveState") == "active", 60, "who waits")
    waits = system.show(RESUME, "MainPID")
    seen = seen_by_nobody(system, "lane", "status")
    assert seen["switch"]["running"] in (True, None)
    assert {code["severity"] for code in seen["notices"]} <= {"unknown"}
    system.wait_for(lambda: metrics(system).get("switch_step") == 6, 60, "a look")
    assert lane(system, "resume", "--only-interrupted")["error"]["code"] == "lane-busy"
    system.systemctl("stop", RESUME)
    assert system.show(RESUME, "MainPID") != waits
    system.run("pkill", "-TERM", "-f", "gpuguard lane switch slow$")
    entry = settled(system)
    assert (entry["outcome"], front(system)) == ("rolled-back", 200)
    assert "interrupted in ready" in " ".join(entry["reasons"])


def test_a_record_that_cannot_be_read_ends_neither_path_nor_service(system: Machine) -> None:
    before = int(system.show(RESUME, "NRestarts"))
    system.live_path(RECORD).write_text("{")
    system.wait_for(lambda: int(system.show(RESUME, "NRestarts")) > before + 2, 60, "tries")
    assert "lane-state-unreadable" in system.journal("-u", RESUME)
    assert system.show("gpuguard-lane-resume.path", "ActiveState") == "active"
    assert front(system) == 200
    system.live_path(RECORD).unlink()
    settled(system)
    assert lane(system, "switch", "b")["outcome"] == "promoted"


def check_back_on_b(system: Machine) -> None:
    system.wait_for(lambda: front(system) == 200, 120, "the lane before")
    entry = settled(system)
    assert (entry["outcome"], is_active(system, "b")) == ("rolled-back", True), entry["reasons"]
    assert "the machine restarted" in " ".join(entry["reasons"])


def test_a_reboot_in_the_middle_of_a_switch(system: Machine) -> None:
    """Asked for: every process gets SIGTERM, and systemd starts nothing any more."""
    begin(system, "slow")
    system.reboot()
    check_back_on_b(system)


def test_a_reboot_while_an_interrupted_switch_is_being_finished(system: Machine) -> None:
    begin(system, "slow")
    kill_switch(system, "slow")
    system.wait_for(
        lambda: "waiting for slow" in system.journal("-u", RESUME), 60, "somebody who goes on"
    )
    system.reboot()
    check_back_on_b(system)


def test_behind_a_shut_gate_it_stays_down_and_says_so(system: Machine) -> None:
    with system.without_cards():
        system.reboot()
        system.wait_for(
            lambda: "requires P2P, and is not started" in system.journal("-u", "lane-b.service"),
            60, "the refusal",
        )  # fmt: skip
        assert front(system) == 503
        codes = [notice["code"] for notice in lane(system, "status")["notices"]]
        assert codes == ["lane-down", "lane-p2p-unproven"]
        refused = lane(system, "switch", "b", "-n")
        assert "lane-p2p-unproven" in [refusal["code"] for refusal in refused["refusals"]]
        assert lane(system, "switch", "a")["outcome"] == "promoted"  # needs neither
        assert front(system) == 200
