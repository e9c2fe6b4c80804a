"""One machine that site.yml brings up, and how the tests look at it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from gpuguard.demo.source import P2P_PATCH
from tests import ansible_kit
from tests.ansible_kit import WHEELS, Fleet, Run, Wall
from tests.booted import Machine
from tests.booted_roots import CLONE, build_wheel
from tests.realroot import REPO

FRONT, PROMETHEUS, ALERTMANAGER = "127.0.0.1:8000", "127.0.0.1:9090", "127.0.0.1:9093"
PROMPT = {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 4}
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
        # its thread lives as long as the machine: what it has started ends with it
        self.wall = Wall("gpu1", system, fleet)

    def boot(self, **host_variables: Any) -> None:
        """Start the machine, and let Ansible know it; from now on its reboots are seen to."""
        self.system.boot(self.system.base.old)
        self.fleet.add("gpu1", self.system, **host_variables)
        self.wall.start()

    def reboot(self) -> None:
        """As somebody would who has logged in."""
        boots = self.wall.boots
        self.system.systemctl("reboot", check=False)
        deadline = time.monotonic() + 120
        while self.wall.boots == boots:
            assert time.monotonic() < deadline, self.system.console()
            time.sleep(0.2)

    @contextmanager
    def changed(self, **variables: Any) -> Iterator[None]:
        """Other variables, for a block."""
        before = dict(self.variables)
        self.variables |= variables
        try:
            yield
        finally:
            self.variables = before

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
        answer = self.http(PROMETHEUS, f"/api/v1/query?query={quote(expression)}")
        found = answer["data"]["result"]
        return {series["metric"].get("job", ""): float(series["value"][1]) for series in found}

    def answers(self) -> bool:
        """Whether the front's lane completes a prompt."""
        answer = self.http(FRONT, "/v1/completions", PROMPT)
        return isinstance(answer, dict) and "choices" in answer

    def firing(self) -> set[str]:
        """Names of alerts that Alertmanager has."""
        alerts = self.http(ALERTMANAGER, "/api/v2/alerts")
        names = alerts if isinstance(alerts, list) else []
        return {alert["labels"]["alertname"] for alert in names}

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


@contextmanager
def bare_site(folder: Path) -> Iterator[Site]:
    """A machine with nothing on it; not started yet."""
    wheel = build_wheel(folder / "wheel")
    with ansible_kit.bare_machine(folder / "machine") as system:
        fleet = Fleet(folder)
        site = Site(system, fleet, folder / "machine/upper", wheel)
        try:
            yield site
        finally:
            site.wall.stop()
            system.cut_power()


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
