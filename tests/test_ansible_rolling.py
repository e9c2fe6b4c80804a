"""rolling-upgrade.yml on booted Debians: out of service, upgrade, reboot, gate, back; or stop.

The driver is the stand-in in real packages; apt, dkms, systemd, GRUB's menu and HAProxy are real.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from gpuguard.serving.store import ACTIVE_FILE
from gpuguard.state import WINDOW_FILE, WINDOWS_DIR
from tests import ansible_kit, booted_roots
from tests.ansible_kit import Fleet, Run, Wall
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


class Hosts:
    """Two hosts that gpuguard looks after; the first one serves."""

    def __init__(self, fleet: Fleet, walls: dict[str, Wall]) -> None:
        self.fleet = fleet
        self.walls = walls
        self.record = b""

    def keep_record(self) -> None:
        """Of the window of gpu1 that waits for its boot."""
        self.record = self.system("gpu1").path(WINDOW_FILE).read_bytes()

    def let_it_wait_again(self) -> None:
        """As if the window of gpu1 had not seen its boot yet: no apt, and minutes less."""
        self.system("gpu1").path(WINDOW_FILE).write_bytes(self.record)
        for wall in self.walls.values():
            wall.before_boot = lambda: None

    def stopped_at_gpu1(self, *said: str) -> Run:
        """A run that must end there, out of service, with these words."""
        boots = self.walls["gpu2"].boots
        run = self.upgrade("-e", "upgrade_ready_seconds=15")
        output = " ".join(run.output.split())
        assert run.returncode != 0, run.output
        assert not run.reached("gpu2")
        assert self.walls["gpu2"].boots == boots
        assert [words for words in said if words not in output] == [], run.output
        return run

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
    lanes = root / "etc/gpuguard/lanes"
    lanes.mkdir(parents=True)
    for name in ("tiny", "other"):
        (lanes / f"{name}.yaml").write_text(yaml.safe_dump({**_LANE, "name": name}))
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
    hosts.walls["gpu1"].before_boot = hosts.keep_record
    hosts.walls["gpu2"].before_boot = lambda: None
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


def test_a_host_that_cannot_be_drained_is_left_as_it_is(hosts: Hosts) -> None:
    hosts.let_it_wait_again()
    boots = hosts.walls["gpu1"].boots
    hosts.system("gpu1").systemctl("stop", "gpuguard-front.service")
    run = hosts.stopped_at_gpu1("Take no new requests")
    assert (run.count("gpu1", "changed"), hosts.walls["gpu1"].boots) == (0, boots)
    _back_in_service(hosts)


def test_what_holds_a_reboot_back_ends_the_run(hosts: Hosts) -> None:
    hosts.let_it_wait_again()
    boots = hosts.walls["gpu1"].boots
    with ansible_kit.held_back(hosts.system("gpu1")):
        hosts.stopped_at_gpu1("has not come back from a reboot", "Reboot command failed")
    assert hosts.walls["gpu1"].boots == boots
    assert _front(hosts.system("gpu1")) == "503", "it stays out of service"


def test_a_window_without_a_verdict_is_not_proven(hosts: Hosts) -> None:
    hosts.let_it_wait_again()
    hosts.walls["gpu1"].before_boot = lambda: _close_unseen(hosts.system("gpu1"))
    hosts.stopped_at_gpu1("gpu1 is not proven")


def test_another_lane_after_the_boot_ends_the_run(hosts: Hosts) -> None:
    system = hosts.system("gpu1")
    for name in ("other", "tiny"):
        system.gpuguard("lane", "switch", name, check=True)
    hosts.let_it_wait_again()
    hosts.walls["gpu1"].before_boot = lambda: _make_previous_active(system)
    run = hosts.stopped_at_gpu1("gpu1 served tiny-", '"active": "other-')
    assert run.count("gpu1", "failed") == 1
    system.gpuguard("lane", "switch", "tiny", check=True)


def test_a_host_that_gets_no_traffic_afterwards_ends_the_run(hosts: Hosts) -> None:
    system = hosts.system("gpu1")
    hosts.let_it_wait_again()
    unit = system.path("/etc/systemd/system/gpuguard-front.service")
    hosts.walls["gpu1"].before_boot = lambda: shutil.move(unit, unit.with_suffix(".away"))
    hosts.stopped_at_gpu1("Give the lane traffic again", "front-down")
    shutil.move(unit.with_suffix(".away"), unit)
    system.systemctl("daemon-reload")
    _back_in_service(hosts)


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


def _back_in_service(hosts: Hosts) -> None:
    system = hosts.system("gpu1")
    system.systemctl("start", "gpuguard-front.service")
    system.gpuguard("lane", "resume", check=True)
    system.wait_for(lambda: _front(system) == "200", 30, "it serves again")


def _close_unseen(system: Machine) -> None:
    """The record says closed, and nobody has looked."""
    waiting = system.path(WINDOW_FILE)
    record = json.loads(waiting.read_text())
    phases = [*record["phases"], {"phase": "closed", "at": record["phases"][-1]["at"]}]
    closed = {**record, "phase": "closed", "phases": phases, "verdict": ""}
    system.path(f"{WINDOWS_DIR}/{record['id']}.json").write_text(json.dumps(closed))
    waiting.unlink()


def _make_previous_active(system: Machine) -> None:
    """As if somebody had switched while the host was away."""
    file = system.path(ACTIVE_FILE)
    record = json.loads(file.read_text())
    record["lane_id"], record["previous"] = record["previous"], record["lane_id"]
    file.write_text(json.dumps(record))


def _front(system: Machine) -> str:
    code = (
        "import urllib.request as r, urllib.error as e\n"
        "try: print(r.urlopen('http://127.0.0.1:8000/v1/models', timeout=10).status)\n"
        "except e.HTTPError as x: print(x.code)\n"
    )
    return system.run("/usr/bin/python3", "-c", code).stdout.strip()
