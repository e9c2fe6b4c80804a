"""rolling-upgrade.yml on booted Debians: out of service, upgrade, reboot, gate, back; or stop.

The driver is the stand-in in real packages; apt, dkms, systemd, GRUB's menu and HAProxy are real.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from tests import ansible_kit, booted_roots
from tests.ansible_kit import Fleet, Run
from tests.booted import Machine, machine
from tests.booted_roots import RELEASES, build_wheel, get_base, install_gpuguard, overlay, publish
from tests.realroot import chroot, mounted
from tests.standin_packages import DRIVER_PACKAGES, UNPATCHED, VERSIONS

pytestmark = pytest.mark.slow

_LANE = {
    "name": "tiny",
    "engine": {"backend": "venv", "venv": "/opt/vllm", "user": "root", "gpus": "none"},
    "model": {"path": "/srv/model", "served_name": "tiny"},
    "args": {"max-model-len": 2048, "shutdown-timeout": 5},
    "env": {"VLLM_ENGINE_READY_TIMEOUT_S": 20},
    "timeouts": {"first_start": 60, "start": 60, "stop": 10, "drain": 5, "memory": 0},
}
# warning: every pair has P2P, and something else is worth a look
_PROVEN = (("closed", "ok"), ("closed", "warning"))


class Wall(threading.Thread):
    """Starts a machine again whenever it goes down for a reboot."""

    def __init__(self, name: str, system: Machine, fleet: Fleet) -> None:
        super().__init__(daemon=True)
        self.host = name
        self.system = system
        self.fleet = fleet
        self.boots = 0
        self.before_boot: Callable[[], None] = lambda: None
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.2):
            if not self.system.is_running:
                self.before_boot()
                self.system.come_back()
                self.fleet.booted(self.host, self.system)
                self.boots += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


class Hosts:
    """Two hosts that gpuguard looks after; the first one serves."""

    def __init__(self, fleet: Fleet, walls: dict[str, Wall]) -> None:
        self.fleet = fleet
        self.walls = walls

    def system(self, name: str) -> Machine:
        return self.walls[name].system

    def publish(self, version: str) -> None:
        """A newer driver in the repository of both."""
        for wall in self.walls.values():
            names = [f"{name}_{version}-1_amd64.deb" for name in DRIVER_PACKAGES]
            publish(wall.system.root, *names)
            wall.system.apt("update")

    def upgrade(self, *words: str) -> Run:
        return self.fleet.play("rolling-upgrade.yml", *words)

    def driver(self, name: str) -> tuple[str | None, str]:
        """Version that is loaded, and what it is."""
        driver = self.system(name).status()["driver"]
        return driver["loaded"], driver["loaded_identity"]

    def windows(self, name: str) -> list[tuple[str, str]]:
        done = self.system(name).gpuguard("--json", "upgrade", "--history", check=True)
        return [(w["phase"], w["verdict"]) for w in json.loads(done.stdout)["windows"]]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    for reason in (ansible_kit.missing(), booted_roots.missing()):
        if reason is not None:
            pytest.skip(reason)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        fleet = Fleet(folder)
        wheel = build_wheel(folder / "wheel")
        walls = {}
        for host in ("gpu1", "gpu2"):
            system = stack.enter_context(_guarded(folder / host, wheel, serves=host == "gpu1"))
            fleet.add(host, system)
            walls[host] = Wall(host, system, fleet)
            walls[host].start()
            stack.callback(walls[host].stop)
        yield Hosts(fleet, walls)


@contextmanager
def _guarded(folder: Path, wheel: Path, *, serves: bool) -> Iterator[Machine]:
    """A machine that runs patched modules, with everything on hold."""
    base = get_base(RELEASES[0])
    with overlay(base.layers, folder) as root:
        install_gpuguard(root, wheel)
        if serves:
            _furnish_serving(root)
        with machine(root, base, folder) as system:
            system.boot(base.old)
            for verb in ("setup", "rebuild", "hold"):
                system.gpuguard(verb, check=True)
            system.reboot()
            if serves:
                system.gpuguard("lane", "setup", check=True)
                system.systemctl("daemon-reload")
                system.systemctl("start", "gpuguard-front.service")
                system.gpuguard("lane", "switch", "tiny", check=True)
            yield system
            system.cut_power()


def _furnish_serving(root: Path) -> None:
    ansible_kit.install_stub_engine(root)
    lane = root / "etc/gpuguard/lanes/tiny.yaml"
    lane.parent.mkdir(parents=True)
    lane.write_text(yaml.safe_dump(_LANE))
    packages = root / "tmp/packages"
    packages.mkdir()
    base = get_base(RELEASES[0])
    for file in ansible_kit.download(base, base.layers[0], "haproxy"):
        shutil.copy(file, packages)
    with mounted(root):
        chroot(root, "sh", "-c", "dpkg -i /tmp/packages/*.deb")


def test_the_first_host_that_does_not_come_back_proven_ends_the_run(hosts: Hosts) -> None:
    hosts.publish(VERSIONS[1])
    front: list[str] = []
    hosts.walls["gpu1"].before_boot = lambda: front.append(
        hosts.system("gpu1").path("/etc/gpuguard/front.cfg").read_text()
    )
    hosts.walls["gpu2"].before_boot = lambda: _lose_the_patch(hosts.system("gpu2"))
    hosts.fleet.add_unreachable("gpu3")
    run = hosts.upgrade()
    assert run.returncode != 0, run.output
    # the first one went all the way
    assert (run.count("gpu1", "failed"), hosts.walls["gpu1"].boots) == (0, 1), run.output
    assert hosts.driver("gpu1") == (VERSIONS[1], "patched")
    assert hosts.windows("gpu1")[-1] in _PROVEN
    assert " disabled" in front[0], "it went down without traffic"
    assert _front(hosts.system("gpu1")) == "200", "and serves again"
    # the second one came back with the stock module, and nobody went on
    assert run.count("gpu2", "failed") == 1
    assert "gpuguard-verify.service" in run.output
    assert hosts.driver("gpu2") == (VERSIONS[1], "stock")
    assert not run.reached("gpu3")
    hosts.fleet.remove("gpu3")


def test_two_hosts_one_after_the_other(hosts: Hosts) -> None:
    for wall in hosts.walls.values():
        wall.before_boot = lambda: None
    hosts.system("gpu2").gpuguard("rebuild", check=True)
    hosts.publish(VERSIONS[2])
    boots = {name: wall.boots for name, wall in hosts.walls.items()}
    looked = hosts.upgrade("--check", "--limit", "gpu1")
    assert (looked.returncode, looked.count("gpu1", "changed")) == (0, 0), looked.output
    assert f"new: {VERSIONS[2]}-1" in looked.output
    # somebody has opened a window there by hand, and has left the reboot to us
    hosts.system("gpu2").gpuguard("upgrade", check=True)
    run = hosts.upgrade()
    assert run.returncode == 0, run.output
    for name in ("gpu1", "gpu2"):
        assert hosts.walls[name].boots == boots[name] + 1
        assert hosts.driver(name) == (VERSIONS[2], "patched")
        assert hosts.windows(name)[-1] in _PROVEN
        held = hosts.system(name).run("apt-mark", "showhold").stdout.split()
        assert set(DRIVER_PACKAGES) <= set(held)
    assert _front(hosts.system("gpu1")) == "200"


def test_with_nothing_to_do_nothing_is_done(hosts: Hosts) -> None:
    boots = [wall.boots for wall in hosts.walls.values()]
    run = hosts.upgrade()
    assert run.returncode == 0, run.output
    assert [run.count(name, "changed") for name in ("gpu1", "gpu2")] == [0, 0]
    assert [wall.boots for wall in hosts.walls.values()] == boots


def test_what_the_window_refuses_takes_nothing_out_of_service(hosts: Hosts) -> None:
    hosts.publish(UNPATCHED)  # the clone has no source of it
    run = hosts.upgrade()
    assert run.returncode != 0
    assert run.count("gpu1", "changed") == 0
    assert not run.reached("gpu2")
    assert _front(hosts.system("gpu1")) == "200"


def _lose_the_patch(system: Machine) -> None:
    """As if somebody had taken the patched modules away between shutdown and boot."""
    for folder in system.path("/lib/modules").glob("*/updates/gpuguard"):
        release = folder.parents[1].name
        shutil.rmtree(folder)
        chroot(system.root, "depmod", release)


def _front(system: Machine) -> str:
    code = (
        "import urllib.request as r, urllib.error as e\n"
        "try: print(r.urlopen('http://127.0.0.1:8000/v1/models', timeout=10).status)\n"
        "except e.HTTPError as x: print(x.code)\n"
    )
    return system.run("/usr/bin/python3", "-c", code).stdout.strip()
