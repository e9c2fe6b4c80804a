"""site.yml on a bare booted Debian: from nothing to a lane that answers, then nothing to do.

The engine is the stub; apt, dkms, systemd, HAProxy, Prometheus and Alertmanager are real. One
machine lives through the whole story, because making it takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuguard.demo.source import P2P_PATCH
from tests import ansible_kit, booted_roots
from tests.ansible_kit import WHEELS, Fleet, Run
from tests.booted import Machine
from tests.booted_roots import CLONE, build_wheel
from tests.realroot import REPO

pytestmark = pytest.mark.slow

_FRONT, _PROMETHEUS, _ALERTMANAGER = "127.0.0.1:8000", "127.0.0.1:9090", "127.0.0.1:9093"
# What a look leaves behind without changing anything: Ansible's folder, logs, bytecode, caches.
_NOT_A_CHANGE = re.compile(
    r"(root/\.ansible|run|tmp|var/log|var/tmp|var/cache/ldconfig|var/lib/(systemd|apt|private))\b"
    r"|.*__pycache__|etc/(resolv\.conf|machine-id)|var/lib/dpkg/lock|srv/lab"
)


class Site:
    """The machine, the variables, and what the runs said."""

    def __init__(self, system: Machine, fleet: Fleet, upper: Path, wheel: Path) -> None:
        self.system = system
        self.fleet = fleet
        self.upper = upper
        self.variables = _variables(wheel, _quick_rules(fleet.folder))

    def play(self, *words: str) -> Run:
        return self.fleet.play("site.yml", *words, variables=self.variables)

    def play_part(self, role: str, tasks: str, *words: str) -> Run:
        """One file of a role's tasks."""
        part = {"ansible.builtin.include_role": {"name": role, "tasks_from": tasks}}
        book = self.fleet.folder / "part.yml"
        book.write_text(yaml.safe_dump([{"hosts": "gpu_hosts", "gather_facts": True,
                                         "tasks": [part]}]))  # fmt: skip
        return self.fleet.play(str(book), *words, variables=self.variables)

    def http(self, address: str, path: str, body: Any = None) -> Any:
        """What a server inside answers; an error's status as a number."""
        text = self.system.run("/usr/bin/python3", "-c", _HTTP, f"http://{address}{path}",
                               json.dumps(body)).stdout  # fmt: skip
        return json.loads(text)

    def query(self, expression: str) -> dict[str, float]:
        """Job -> value."""
        found = self.http(_PROMETHEUS, f"/api/v1/query?query={expression}")["data"]["result"]
        return {series["metric"].get("job", ""): float(series["value"][1]) for series in found}

    def changes(self) -> set[str]:
        """Files of the machine that are not as the layers below have them."""
        files = set()
        for folder, _, names in os.walk(self.upper):
            inside = Path(folder).relative_to(self.upper)
            for name in names:
                path, status = str(inside / name), (Path(folder) / name).lstat()
                if not _NOT_A_CHANGE.match(path):
                    files.add(f"{path} {status.st_size} {status.st_mtime_ns}")
        return files


_HTTP = """
import json, sys, urllib.error, urllib.request
address, body = sys.argv[1], json.loads(sys.argv[2])
data = None if body is None else json.dumps(body).encode()
request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
try:
    print(urllib.request.urlopen(request, timeout=20).read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
except urllib.error.URLError:
    print(0)
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    for reason in (ansible_kit.missing(), booted_roots.missing()):
        if reason is not None:
            pytest.skip(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build_wheel(folder / "wheel")
        with ansible_kit.bare_machine(folder / "machine") as system:
            ansible_kit.install_stub_engine(system.root)
            system.boot(system.base.old)
            fleet = Fleet(folder)
            fleet.add("gpu1", system)
            yield Site(system, fleet, folder / "machine/upper", wheel)
            system.cut_power()


def test_check_mode_passes_on_a_bare_host_and_changes_nothing(site: Site) -> None:
    before = site.changes()
    run = site.play("--check")
    assert run.returncode == 0, run.output
    assert run.count("gpu1", "changed") > 5, "it says what a real run would do"
    assert site.changes() == before
    assert not site.system.path("/opt/gpuguard").exists()


def test_from_bare_to_a_lane_that_answers(site: Site) -> None:
    run = site.play()
    assert run.returncode == 0, run.output
    status = site.system.status()
    assert status["kernels"][0]["ready"], status
    assert status["holds"]["missing"] == []
    held = site.system.run("apt-mark", "showhold").stdout.split()
    assert {"nvidia-driver", "linux-headers-cloud-amd64", "linux-image-cloud-amd64"} <= set(held)
    answer = site.http(_FRONT, "/v1/completions", _PROMPT)
    assert answer["choices"][0]["text"], answer


def test_the_second_run_changes_nothing(site: Site) -> None:
    again = site.play()
    assert again.returncode == 0, again.output
    assert again.count("gpu1", "changed") == 0, again.output
    checked = site.play("--check", "--tags", "gpuguard")
    assert (checked.returncode, checked.count("gpu1", "changed")) == (0, 0), checked.output


def test_what_listens_listens_on_loopback(site: Site) -> None:
    lines = site.system.run("ss", "-Hltn").stdout.splitlines()
    addresses = {line.split()[3] for line in lines}
    wanted = {_FRONT, _PROMETHEUS, _ALERTMANAGER, "127.0.0.1:9100", "127.0.0.1:9838",
              "127.0.0.1:18001"}  # fmt: skip
    assert wanted <= addresses
    assert {a for a in addresses if not a.startswith("127.0.0.1:")} == set()


def test_prometheus_scrapes_all_and_has_the_rules_of_the_package(site: Site) -> None:
    jobs = {"gpuguard", "vllm", "node", "prometheus", "alertmanager"}
    site.system.wait_for(lambda: site.query("up") == dict.fromkeys(jobs, 1.0), 60, "all scraped")
    groups = site.http(_PROMETHEUS, "/api/v1/rules")["data"]["groups"]
    loaded = {rule["name"] for group in groups for rule in group["rules"]}
    for file in (REPO / "gpuguard/resources/prometheus").glob("*.rules.yml"):
        for group in yaml.safe_load(file.read_text())["groups"]:
            names = {rule.get("alert", rule.get("record")) for rule in group["rules"]}
            assert names <= loaded


def test_an_alert_fires_when_the_engine_is_killed(site: Site) -> None:
    # the lane came after Prometheus: what that said of the time before has to end first
    site.system.wait_for(lambda: "VllmEngineDead" not in _firing(site), 60, "no alert")
    main = site.system.show("lane-tiny.service", "MainPID")
    engine = site.system.run("ps", "-o", "pid=", "--ppid", main).stdout.split()[0]
    site.system.run("kill", "-9", engine)
    site.system.wait_for(lambda: "VllmEngineDead" in _firing(site), 90, "the alert")
    site.system.wait_for(lambda: site.http(_FRONT, "/health") == 503, 30, "an honest 503")


def test_after_a_reboot_the_lane_serves_by_itself(site: Site) -> None:
    site.system.reboot()
    site.fleet.booted("gpu1", site.system)
    site.system.wait_for(lambda: _answers(site), 90, "the lane serves")
    assert site.system.gpuguard("verify").returncode == 0
    assert site.system.show("nvidia-persistenced.service", "ActiveState") == "active"
    again = site.play("--tags", "nvidia_driver")
    assert (again.returncode, again.count("gpu1", "changed")) == (0, 0), again.output


def test_images_are_pulled_by_digest_and_cards_are_named_for_the_driver(site: Site) -> None:
    for name, script in _RUNTIME.items():
        program = site.system.path(f"/usr/local/bin/{name}")
        program.write_text(script)
        program.chmod(0o755)
    image = f"registry.example.org/vllm@sha256:{'5' * 64}"
    site.variables |= {
        "vllm_lanes": {"int4": {"engine": {"backend": "quadlet", "image": image}}},
        "vllm_podman_packages": [],
        "vllm_toolkit_packages": [],
        "vllm_registry_auth": {"auths": {"registry.example.org": {"auth": "c2VjcmV0"}}},
    }
    first = site.play_part("vllm", "containers", "-v", "--diff")
    assert first.returncode == 0, first.output
    assert "c2VjcmV0" not in first.output
    assert site.system.path("/srv/pulled").read_text() == (
        f"pull --quiet --authfile /etc/gpuguard/registry/config.json {image}\n"
    )
    again = site.play_part("vllm", "containers")
    assert (again.returncode, again.count("gpu1", "changed")) == (0, 0), again.output
    cards = site.system.path("/etc/cdi/nvidia.yaml")
    cards.write_text("of the driver before: libcuda.so.999.00.01\n")
    renewed = site.play_part("vllm", "containers")
    assert (renewed.returncode, renewed.count("gpu1", "changed")) == (0, 1), renewed.output
    assert "libcuda.so.999.10.01" in cards.read_text()


def test_another_version_of_the_driver_is_refused(site: Site) -> None:
    site.variables["nvidia_driver_version"] = "999.20.01-1"
    run = site.play("--tags", "nvidia_driver")
    assert run.returncode != 0
    assert "maintenance window" in run.output
    assert run.count("gpu1", "changed") == 0


def test_a_configuration_that_gpuguard_refuses_does_not_replace_the_old_one(site: Site) -> None:
    before = site.system.path("/etc/gpuguard/gpuguard.yaml").read_text()
    site.variables["gpuguard_config"]["build"] = {"jobs": "many"}
    run = site.play_part("gpuguard", "configure")
    assert run.returncode != 0
    assert "build.jobs" in run.output
    assert site.system.path("/etc/gpuguard/gpuguard.yaml").read_text() == before


def test_a_lane_that_gpuguard_refuses_does_not_replace_the_old_one(site: Site) -> None:
    before = site.system.path("/etc/gpuguard/lanes/tiny.yaml").read_text()
    lane = yaml.safe_load(before)
    del lane["name"]
    site.variables["vllm_lanes"] = {"tiny": {**lane, "args": {"load-format": "dummy"}}}
    run = site.play_part("vllm", "lanes")
    assert run.returncode != 0
    assert "dummy" in run.output
    assert site.system.path("/etc/gpuguard/lanes/tiny.yaml").read_text() == before


# Container runtimes need more than a container gives: programs that do what the role relies on.
_RUNTIME = {
    "podman": '#!/bin/sh\n[ "$1" = image ] && exec grep -qs "$3" /srv/pulled\n'
    'echo "$@" >>/srv/pulled\n',
    "nvidia-ctk": '#!/bin/sh\nmkdir -p /etc/cdi && echo libcuda.so.999.10.01 >"$4"\n',
}
_PROMPT = {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 4}


def _answers(site: Site) -> bool:
    answer = site.http(_FRONT, "/v1/completions", _PROMPT)
    return isinstance(answer, dict) and "choices" in answer


def _firing(site: Site) -> set[str]:
    alerts = site.http(_ALERTMANAGER, "/api/v2/alerts")
    return {alert["labels"]["alertname"] for alert in alerts} if isinstance(alerts, list) else set()


def _quick_rules(folder: Path) -> Path:
    """Our own rule for a dead engine, with seconds in place of minutes."""
    source = REPO / "gpuguard/resources/prometheus/gpuguard-alerts.rules.yml"
    groups = yaml.safe_load(source.read_text())["groups"]
    rule = next(r for g in groups for r in g["rules"] if r.get("alert") == "VllmEngineDead")
    quick = {"groups": [{"name": "quick", "rules": [{**rule, "for": "2s"}]}]}
    file = folder / "quick.rules.yml"
    file.write_text(yaml.safe_dump(quick))
    subprocess.run(["promtool", "check", "rules", file], check=True, capture_output=True)
    return file


def _variables(wheel: Path, rules: Path) -> dict[str, Any]:
    lane = {
        "engine": {"backend": "venv", "venv": "/opt/vllm", "gpus": "none"},
        "model": {"path": "/srv/model", "served_name": "tiny"},
        "args": {"max-model-len": 2048, "max-num-seqs": 4, "shutdown-timeout": 5},
        "env": {"VLLM_ENGINE_READY_TIMEOUT_S": 20},
        "timeouts": {"first_start": 60, "start": 60, "stop": 10, "drain": 5, "memory": 0},
    }
    return {
        "gpuguard_wheel": str(wheel),
        "gpuguard_pip_arguments": ["--no-index", "--find-links", WHEELS],
        "gpuguard_source_repository": CLONE,
        "gpuguard_source_version": "999.30.01",
        "gpuguard_patches": [str(P2P_PATCH)],
        "gpuguard_config": {
            "source": {
                "ref": "{driver_version}",
                "patches": [f"/etc/gpuguard/patches/{P2P_PATCH.name}"],
            },
            "p2p": {"expected_gpus": 4},
        },
        "nvidia_driver_version": "999.10.01-1",
        "monitoring_interval": "1s",
        "monitoring_more_rules": [str(rules)],
        # they fall back on each other: neither could be checked alone
        "vllm_lanes": {"tiny": {**lane, "fallback": ["other"]},
                       "other": {**lane, "fallback": ["tiny"], "port": 18002}},
        "vllm_activate": "tiny",
    }  # fmt: skip
