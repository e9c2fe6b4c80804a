"""The role vllm on a booted Debian 13 with Podman: images by digest, a lane, the front before it.

The engine is the stub in an image; Podman, its generator, the registry and HAProxy are real.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ansible_kit, booted_roots
from tests.ansible_kit import Fleet, Run
from tests.booted import Machine
from tests.booted_containers import DEBIAN, MODEL, container_machine, image
from tests.realroot import Lab, cache_dir
from tests.test_lane_booted import front

pytestmark = pytest.mark.slow
_REGISTRY = "127.0.0.1:5000"
_INSECURE = f'[[registry]]\nlocation = "{_REGISTRY}"\ninsecure = true\n'


class Host:
    """The machine, and the role run on it."""

    def __init__(self, system: Machine, fleet: Fleet, first: str) -> None:
        self.system = system
        self.fleet = fleet
        self.variables: dict[str, Any] = {
            "vllm_lanes": {"a": _lane(first)},
            "vllm_activate": "a",
            "vllm_toolkit_packages": ["no-lane-has-cards"],
        }

    def play(self, *words: str) -> Run:
        book = self.fleet.folder / "role.yml"
        roles = {"hosts": "gpu_hosts", "gather_facts": True, "roles": ["vllm"]}
        book.write_text(yaml.safe_dump([roles]))
        return self.fleet.play(str(book), *words, variables=self.variables)

    def started(self) -> str:
        return self.system.show("lane-a.service", "InvocationID")


def _lane(name: str) -> dict[str, Any]:
    return {
        "engine": {"backend": "quadlet", "image": name, "gpus": "none"},
        "model": {"path": MODEL, "served_name": "tiny"},
        "args": {"max-model-len": 2048, "max-num-seqs": 4, "shutdown-timeout": 5},
        "env": {"VLLM_ENGINE_READY_TIMEOUT_S": 40},
        "timeouts": {"first_start": 60, "start": 60, "stop": 10, "drain": 5, "memory": 0},
    }


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    for reason in (ansible_kit.missing(), booted_roots.missing()):
        if reason is not None:
            pytest.skip(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "machine").mkdir()
        with container_machine(folder / "machine") as system:
            _add_python_apt(system)
            fleet = Fleet(folder)
            fleet.add("gpu1", system)
            yield Host(system, fleet, image(system, "a"))


def _add_python_apt(system: Machine) -> None:
    """What the module apt would fetch; this machine has no archive that knows it."""
    lab = Lab(cache_dir() / f"apt-{DEBIAN.suite}", release=DEBIAN.suite)
    files = lab.with_needs(system.root, "python3-apt")
    for file in files:
        shutil.copy(file, system.live_path("/srv") / file.name)
    system.run("dpkg", "-i", *(f"/srv/{file.name}" for file in files))


def test_check_mode_changes_nothing(host: Host) -> None:
    run = host.play("--check")
    assert run.returncode == 0, run.output
    assert not host.system.path("/etc/gpuguard/lanes").exists()


def test_a_lane_in_a_container_answers_through_the_front(host: Host) -> None:
    run = host.play()
    assert run.returncode == 0, run.output
    assert front(host.system) == 200
    assert host.system.path("/etc/containers/systemd/lane-a.container").exists()


def test_the_second_run_changes_nothing(host: Host) -> None:
    started = host.started()
    again = host.play()
    assert (again.returncode, again.count("gpu1", "changed")) == (0, 0), again.output
    assert host.started() == started


def test_an_image_without_a_digest_ends_the_run(host: Host) -> None:
    run = _with_lane(host, "b", _lane("localhost/vllm:a"))
    assert run.returncode != 0
    output = " ".join(run.output.split())
    assert "lane b is refused, and nothing was changed" in output
    assert "digest" in output


def test_a_digest_that_nobody_has_ends_the_run(host: Host) -> None:
    started = host.started()
    run = _with_lane(host, "b", _lane(f"{_REGISTRY}/vllm@sha256:{'ab' * 32}"))
    assert run.returncode != 0
    assert "Pull images with Podman" in run.output
    assert not host.system.path("/etc/gpuguard/lanes/b.yaml").exists()
    assert (front(host.system), host.started()) == (200, started)


def test_an_image_is_pulled_by_its_digest_and_serves_after_a_switch(host: Host) -> None:
    system = host.system
    name = _in_the_registry_alone(system)
    started = host.started()
    run = _with_lane(host, "b", _lane(name))
    assert run.returncode == 0, run.output
    system.run("podman", "image", "exists", name)
    assert host.started() == started, system.journal("-u", "lane-a.service", "-n", "60")
    again = host.play()
    assert (again.returncode, again.count("gpu1", "changed")) == (0, 0), again.output
    system.gpuguard("lane", "switch", "b", check=True)
    assert front(system) == 200
    served = system.run("podman", "inspect", "--format={{.ImageName}}", "lane-b").stdout.strip()
    assert served == name
    last = host.play()
    assert (last.returncode, last.count("gpu1", "changed")) == (0, 0), last.output
    assert "b-" in last.output, "it says that another lane serves than the first one"
    assert system.show("lane-b.service", "ActiveState") == "active"


def test_docker_with_compose_takes_the_same_steps(host: Host) -> None:
    system = host.system
    system.systemctl("start", "docker.service")
    name = system.run("podman", "inspect", "--format={{.ImageName}}", "lane-b").stdout.strip()
    lane = _lane(name)
    lane["engine"]["backend"] = "compose"
    host.variables["vllm_docker_packages"] = ["docker.io", "docker-compose"]  # as Debian calls it
    run = _with_lane(host, "c", lane)
    assert run.returncode == 0, run.output
    system.run("docker", "image", "inspect", name)
    system.gpuguard("lane", "switch", "c", check=True)
    assert front(system) == 200
    again = host.play()
    assert (again.returncode, again.count("gpu1", "changed")) == (0, 0), again.output


def _with_lane(host: Host, name: str, lane: dict[str, Any]) -> Run:
    host.variables["vllm_lanes"][name] = lane
    return host.play()


def _in_the_registry_alone(system: Machine) -> str:
    """Name by digest of an image that only the registry has."""
    system.live_path("/etc/containers/registries.conf.d/lab.conf").write_text(_INSECURE)
    image(system, "b")
    system.systemctl("start", "docker-registry.service")
    ready = "until ss -ltnH sport = :5000 | grep -q .; do sleep 0.1; done"
    system.run("sh", "-c", ready)
    tagged = f"{_REGISTRY}/vllm:b"
    system.run("podman", "push", "-q", "--digestfile=/srv/digest", "localhost/vllm:b", tagged)
    system.run("podman", "rmi", "-f", "localhost/vllm:b")
    return f"{_REGISTRY}/vllm@{system.live_path('/srv/digest').read_text().strip()}"
