"""Lanes that docker compose runs, for real: systemd, compose, Docker, HAProxy.

The tests are stages of one story, on a booted Debian 13.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.booted import Machine
from tests.booted_containers import docker_image
from tests.container_story import QUICK, declare, drop_in, ours, processes, story_machine
from tests.test_lane_booted import front, is_active, lane

pytestmark = pytest.mark.slow
IMAGES: dict[str, str] = {}
SECRETS = "/etc/gpuguard/secrets"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Docker runs, also after a boot; two lanes of two images; none serves."""
    for machine in story_machine(tmp_path_factory.mktemp("compose")):
        machine.systemctl("enable", "containerd.service", "docker.socket", "docker.service")
        for name in ("a", "b"):
            IMAGES[name] = docker_image(machine, name)
            declare(machine, name, "compose", IMAGES[name])
        yield machine


def inspect(system: Machine, name: str, what: str) -> str:
    done = system.run("docker", "container", "inspect", f"--format={what}", f"lane-{name}")
    return done.stdout.strip()


def containers(system: Machine) -> list[str]:
    """Those that run."""
    return system.run("docker", "ps", "--format={{.Names}}").stdout.split()


def test_forward_and_back(system: Machine) -> None:
    for name in ("a", "b"):
        done = lane(system, "switch", name)
        assert (done["status"], done["outcome"], front(system)) == (0, "promoted", 200), done
        assert inspect(system, name, "{{.Config.Image}}") == IMAGES[name]
    back = lane(system, "rollback")
    assert (back["status"], is_active(system, "a"), is_active(system, "b")) == (0, True, False)
    assert containers(system) == ["lane-a"]
    assert lane(system, "status")["verdict"] == "ok"


def test_a_lane_that_cannot_start(system: Machine) -> None:
    declare(system, "bad", "compose", IMAGES["b"], env={"STUB_FATAL": "the stub will not"})
    done = lane(system, "switch", "bad")
    assert (done["status"], done["outcome"], front(system)) == (70, "rolled-back", 200), done
    line = done["reasons"][0].rpartition("; its last line: ")[2]
    assert line.startswith("(EngineCore pid="), done["reasons"]  # without an escape sequence
    assert line.endswith("the stub will not")
    assert containers(system) == ["lane-a"]


def test_a_container_that_was_changed_is_not_promoted(system: Machine) -> None:
    changed = "/etc/gpuguard/changed.yaml"
    system.live_path(changed).write_text(f"services: {{vllm: {{image: '{IMAGES['a']}'}}}}\n")
    rendered = "/var/lib/gpuguard/lanes/rendered/lane-b.compose.yaml"
    place = "/etc/systemd/system/lane-b.service.d/changed.conf"
    up = f"/usr/bin/docker compose -p lane-b -f {rendered} -f {changed} up"
    drop_in(system, place, f"[Service]\nExecStart=\nExecStart={up}\n")
    done = lane(system, "switch", "b")
    drop_in(system, place, "")
    assert (done["outcome"], front(system)) == ("rolled-back", 200), done
    assert "container lane-b is of image" in done["reasons"][0]
    assert any(place in note for note in done["notes"]), done["notes"]


def test_secrets_are_roots_alone(system: Machine) -> None:
    folder = system.live_path(SECRETS)
    folder.mkdir(mode=0o700)
    file = folder / "b.env"
    file.write_text("HF_TOKEN=hf_not_for_everybody\nNCCL_P2P_DISABLE=0\n")
    file.chmod(0o600)
    assert lane(system, "switch", "b")["outcome"] == "promoted"
    given = inspect(system, "b", "{{json .Config.Env}}")
    assert "HF_TOKEN=hf_not_for_everybody" in given
    words = ("grep", "-rlsF", "hf_not_for_everybody", "/etc", "/var/lib", "/run")
    assert f"{SECRETS}/b.env" in system.run(*words, check=False).stdout.split()
    assert system.run(*words, check=False, user="nobody").stdout == ""


def test_its_processes_are_known_as_the_lanes(system: Machine) -> None:
    server = system.run("pgrep", "-P", inspect(system, "b", "{{.State.Pid}}")).stdout.strip()
    engine = processes(system, server)
    assert ours(system, "a,b", engine | {1}) == " ".join(map(str, sorted(engine)))
    assert ours(system, "a", engine) == ""


@pytest.mark.parametrize("victim", ["engine", "compose"])
def test_what_dies_is_started_again(system: Machine, victim: str) -> None:
    drop_in(system, "/etc/systemd/system/lane-b.service.d/quick.conf", QUICK)
    container = inspect(system, "b", "{{.Id}}")
    before = int(system.show("lane-b.service", "NRestarts"))
    if victim == "engine":
        init = inspect(system, "b", "{{.State.Pid}}")
        server = system.run("pgrep", "-P", init).stdout.strip()
        system.run("pkill", "-9", "-P", server)
    else:
        kill_compose(system)
    system.wait_for(
        lambda: int(system.show("lane-b.service", "NRestarts")) > before, 60, "a restart"
    )
    system.wait_for(lambda: is_another(system, container), 60, "a new container")
    system.wait_for(lambda: front(system) == 200, 60, "the lane")
    assert containers(system) == ["lane-b"]


def kill_compose(system: Machine) -> None:
    group = system.show("lane-b.service", "ControlGroup")
    pids = system.run("cat", f"/sys/fs/cgroup{group}/cgroup.procs").stdout.split()
    system.run("kill", "-9", *pids)


def is_another(system: Machine, container: str) -> bool:
    known = system.run("docker", "ps", "-q", "--no-trunc", "--filter=name=lane-b").stdout.split()
    return bool(known) and container not in known


def test_no_container_outlives_its_unit(system: Machine) -> None:
    """As when memory runs out: compose is killed, and the container is Docker's."""
    drop_in(system, "/etc/systemd/system/lane-b.service.d/quick.conf", "[Service]\nRestart=no\n")
    kill_compose(system)
    system.wait_for(lambda: system.show("lane-b.service", "ActiveState") == "failed", 60, "its end")
    assert containers(system) == []
    drop_in(system, "/etc/systemd/system/lane-b.service.d/quick.conf", "")
    system.systemctl("reset-failed", "lane-b.service")  # it was started often enough
    system.systemctl("start", "lane-b.service")
    system.wait_for(lambda: front(system) == 200, 60, "the lane")


def test_prune_leaves_images_that_are_needed(system: Machine) -> None:
    system.run("docker", "image", "prune", "--all", "--force")
    assert lane(system, "status")["verdict"] == "ok"
    system.run("docker", "system", "prune", "--all", "--force")  # takes what keeps them first
    (notice,) = lane(system, "status")["notices"]
    assert (notice["code"], notice["severity"]) == ("lane-image-gone", "warning")


def test_after_a_reboot_it_serves_by_itself(system: Machine) -> None:
    system.reboot()
    system.wait_for(lambda: front(system) == 200, 60, "the lane")
    assert containers(system) == ["lane-b"]
