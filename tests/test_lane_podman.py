"""Lanes in containers for real: Quadlet's generator, systemd, Podman, HAProxy; back and forth.

The tests are stages of one story, on a booted Debian 13.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.booted import Machine
from tests.booted_containers import image
from tests.container_story import QUICK, declare, drop_in, ours, processes, story_machine
from tests.test_lane_booted import front, is_active, lane

pytestmark = pytest.mark.slow
IMAGES: dict[str, str] = {}
ON_TOP = "/etc/containers/systemd/lane-b.container.d/on-top.conf"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Two lanes of two images; none serves."""
    for machine in story_machine(tmp_path_factory.mktemp("podman")):
        for name in ("a", "b"):
            IMAGES[name] = image(machine, name)
            declare(machine, name, "quadlet", IMAGES[name])
        yield machine


def inspect(system: Machine, name: str, what: str) -> str:
    done = system.run("podman", "container", "inspect", f"--format={what}", f"lane-{name}")
    return done.stdout.strip()


def failed(system: Machine, done: dict[str, Any], before: str) -> str:
    """The switch led back; why it did."""
    assert (done["status"], done["outcome"]) == (70, "rolled-back"), done
    assert (is_active(system, before), front(system)) == (True, 200)
    return str(done["reasons"][0])


def test_forward_and_back(system: Machine) -> None:
    for name in ("a", "b"):
        done = lane(system, "switch", name)
        assert (done["status"], done["outcome"], front(system)) == (0, "promoted", 200), done
        assert inspect(system, name, "{{.ImageName}}") == IMAGES[name]
    back = lane(system, "rollback")
    assert (back["status"], is_active(system, "a"), is_active(system, "b")) == (0, True, False)
    assert system.run("podman", "ps", "-a", "--format={{.Names}}").stdout.split() == ["lane-a"]
    assert lane(system, "status")["verdict"] == "ok"


def test_an_image_that_does_not_run_as_root_keeps_its_kernels(system: Machine) -> None:
    declare(system, "plain", "quadlet", image(system, "plain", user="2000:2000"))
    done = lane(system, "switch", "plain")
    assert (done["outcome"], done["notes"]) == ("promoted", []), done["reasons"]
    (compiled,) = system.live_path("/var/cache/gpuguard/lanes").glob("plain-*/compiled")
    assert compiled.stat().st_uid == 2000
    assert lane(system, "rollback")["outcome"] == "promoted"


def test_an_image_that_is_not_here_stops_nothing(system: Machine) -> None:
    started = inspect(system, "a", "{{.State.StartedAt}}")
    declare(system, "gone", "quadlet", f"localhost/vllm@sha256:{'ab' * 32}")
    done = lane(system, "switch", "gone")
    assert (done["status"], done["outcome"]) == (69, "refused"), done
    assert "is not on this machine" in done["reasons"][0]
    assert (inspect(system, "a", "{{.State.StartedAt}}"), front(system)) == (started, 200)


def test_the_engines_last_words_are_told_not_podmans(system: Machine) -> None:
    declare(system, "bad", "quadlet", IMAGES["b"], env={"STUB_FATAL": "the stub will not"})
    reason = failed(system, lane(system, "switch", "bad"), "a")
    assert reason.endswith("the stub will not"), reason


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Image={a}", "is of image"),
        ("Exec=/models --served-model-name tiny --host 0.0.0.0 --port 8000 --max-model-len 2048",
         "does not have the arguments of the lane"),
        ("Environment=VLLM_ENGINE_READY_TIMEOUT_S=41",
         "does not have the lane's value of VLLM_ENGINE_READY_TIMEOUT_S"),
        ("Volume=\nVolume=/srv/model:/models:ro", "does not see /var/cache/gpuguard/lanes/b-"),
        ("ContainerName=another", "podman does not tell what runs as lane-b"),
    ],
)  # fmt: skip
def test_what_runs_instead_of_the_lane_is_not_promoted(
    system: Machine, text: str, why: str
) -> None:
    drop_in(system, ON_TOP, "[Container]\n" + text.format(**IMAGES) + "\n")
    done = lane(system, "switch", "b")
    drop_in(system, ON_TOP, "")
    assert why in failed(system, done, "a")
    assert any(ON_TOP in note for note in done["notes"]), done["notes"]


def test_a_stop_lets_requests_end(system: Machine) -> None:
    declare(system, "b", "quadlet", IMAGES["b"], env={"STUB_TOKEN_SECONDS": "0.2"})
    assert lane(system, "switch", "b")["outcome"] == "promoted"
    ask = """import json, urllib.request
body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 15}).encode()
place = "http://127.0.0.1:8000/v1/completions"
request = urllib.request.Request(place, body, {"Content-Type": "application/json"})
print(len(json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["text"]))"""
    with system.start("/usr/bin/python3", "-c", ask) as asking:
        system.wait_for(lambda: running(system) == 1, 20, "the request is under way")
        system.systemctl("stop", "lane-b.service")
        out, err = asking.communicate(timeout=30)
    assert out.strip() == "15", err
    system.systemctl("start", "lane-b.service")
    system.wait_for(lambda: front(system) == 200, 30, "the lane")


def running(system: Machine) -> int:
    """Requests that the lane says it works on."""
    return int(lane(system, "status")["load"]["running"] or 0)


@pytest.mark.parametrize("groups", ["split", "enabled", "no-conmon"])
def test_its_processes_are_known_as_the_lanes(system: Machine, groups: str) -> None:
    drop_in(system, ON_TOP, f"[Container]\nPodmanArgs=--cgroups={groups}\n")
    restart(system)
    engine = processes(system, inspect(system, "b", "{{.State.Pid}}"))
    drop_in(system, ON_TOP, "")
    assert ours(system, "a,b", engine | {1}) == " ".join(map(str, sorted(engine)))
    assert ours(system, "a", engine) == ""


def restart(system: Machine) -> None:
    system.systemctl("reset-failed", "lane-b.service")  # only so many starts in an hour
    system.systemctl("restart", "lane-b.service")
    system.wait_for(lambda: front(system) == 200, 30, "the lane")


def test_an_engine_that_dies_is_started_again(system: Machine) -> None:
    drop_in(system, "/etc/systemd/system/lane-b.service.d/quick.conf", QUICK)
    restart(system)
    main = inspect(system, "b", "{{.State.Pid}}")
    system.run("pkill", "-9", "-P", main)
    system.wait_for(lambda: system.show("lane-b.service", "NRestarts") == "1", 30, "a restart")
    system.wait_for(lambda: front(system) == 200, 30, "the lane")
    assert system.show("lane-b.service", "Result") == "success"  # it left with status 0


def test_after_a_reboot_it_serves_by_itself(system: Machine) -> None:
    system.reboot()
    system.wait_for(lambda: front(system) == 200, 60, "the lane")
    assert (is_active(system, "a"), is_active(system, "b")) == (False, True)
    assert lane(system, "status")["active"].startswith("b-")


def prune(system: Machine, *words: str) -> set[str]:
    """Prune, and which of our images are left."""
    system.run("podman", *words, "prune", "--all", "--force", timeout=120)
    return {
        name
        for name, reference in IMAGES.items()
        if not system.run("podman", "image", "exists", reference, check=False).returncode
    }


def test_prune_leaves_images_that_are_needed(system: Machine) -> None:
    assert prune(system, "image") == {"a", "b"}
    assert prune(system, "system") == {"a", "b"}
    assert lane(system, "status")["verdict"] == "ok"
    system.systemctl("stop", "lane-b.service")  # then neither is used by a container
    assert prune(system, "system") == {"a", "b"}
    system.systemctl("start", "lane-b.service")
    assert lane(system, "rollback")["outcome"] == "promoted"
    assert prune(system, "system") == {"a", "b"}


def test_an_image_that_no_lane_needs_is_let_go(system: Machine) -> None:
    IMAGES["c"] = image(system, "c")
    declare(system, "c", "quadlet", IMAGES["c"])
    assert lane(system, "switch", "c")["outcome"] == "promoted"
    assert prune(system, "image") == {"a", "c"}


def test_a_fallback_is_kept_and_an_image_that_is_gone_is_told(system: Machine) -> None:
    IMAGES["b"] = image(system, "b2")
    declare(system, "b", "quadlet", IMAGES["b"], fallback=["c"])
    for name in ("a", "b"):
        assert lane(system, "switch", name)["outcome"] == "promoted"
    assert prune(system, "image") == {"a", "b", "c"}
    system.run("podman", "system", "prune", "--all", "--force", "--volumes", timeout=120)
    notices = lane(system, "status")["notices"]
    told = [(n["code"], n["severity"], n["message"].partition("-")[0]) for n in notices]
    assert told == [("lane-image-gone", "warning", "a"), ("lane-image-gone", "warning", "c")]
    assert [r["code"] for r in lane(system, "rollback", "-n")["refusals"]] == [
        "lane-engine-missing"
    ]
