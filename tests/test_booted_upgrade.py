"""gpuguard in a booted Debian that really upgrades its kernel and its driver.

The tests are stages of one story and run in this order, on one machine per release of Debian:
set up; a newer kernel comes by apt, goes, and comes by dpkg; the driver is upgraded; then both at
once in a maintenance window, on hold. Kernel, headers, dkms, apt, systemd and GRUB's menu are
the distribution's; the driver is a stand-in in real packages (standin_packages.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.booted import Machine
from tests.booted_roots import ARCHIVE, METAS, RELEASES
from tests.booted_story import (
    REBUILD,
    driver_files,
    is_idle,
    kernel,
    kernel_files,
    metas,
    offer,
    story_machine,
    wait_until_ready,
)
from tests.standin_packages import DKMS_PACKAGE, DRIVER_PACKAGES, VERSIONS

pytestmark = pytest.mark.slow

PROVEN = ("ok", "warning")  # a virtual machine is warned of, and tests often run on one
UNITS = (
    "gpuguard.service", "gpuguard-rebuild.service", "gpuguard-rebuild.path",
    "gpuguard-rebuild.timer", "gpuguard-verify.service", "gpuguard-verify.timer",
    "gpuguard-hold-reboot.service",
)  # fmt: skip


@pytest.fixture(scope="module", params=RELEASES, ids=lambda debian: debian.suite)
def system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    yield from story_machine(request.param, tmp_path_factory.mktemp(request.param.suite))


def test_setup_leaves_a_system_that_runs(system: Machine) -> None:
    done = system.gpuguard("setup")
    assert done.returncode == 0, done.stdout + done.stderr
    assert system.systemctl("is-system-running") == "running"
    again = system.gpuguard("setup")
    assert again.returncode == 0
    assert "everything is in place" in again.stdout
    for unit in ("gpuguard-rebuild.path", "gpuguard-rebuild.timer", "gpuguard.service"):
        assert system.systemctl("is-active", unit) == "active"
        assert system.systemctl("is-enabled", unit) == "enabled"


def test_systemd_finds_no_fault_in_the_units(system: Machine) -> None:
    done = system.run("systemd-analyze", "verify", "--man=no", *UNITS, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    # exit status 1 above the threshold, which is in tenths
    system.run("systemd-analyze", "security", "--threshold=20", "gpuguard.service")
    assert "ordering cycle" not in system.journal()


def test_no_unit_takes_the_devices_away_that_it_needs(system: Machine) -> None:
    # A list of devices would leave the gate without cards, and grub-probe without disks; several
    # of systemd's settings imply one. Where there is a list, the cards are on it.
    for unit in ("gpuguard-verify.service", "gpuguard-rebuild.service"):
        assert system.show(unit, "DeviceAllow") == ""
        assert system.show(unit, "DevicePolicy") == "auto"
    assert "char-nvidia rw" in system.show("gpuguard.service", "DeviceAllow")


def test_the_running_kernel_is_made_ready_and_booted(system: Machine) -> None:
    done = system.gpuguard("rebuild")
    assert done.returncode == 0, done.stdout + done.stderr
    assert system.reboot() == system.base.old
    assert system.systemctl("is-system-running") == "running"
    assert "ordering cycle" not in system.journal()
    status = system.status()
    assert status["verdict"] == "ok", status["findings"]
    assert pass_gate(system)["kernel"] == system.base.old


def test_apt_brings_a_newer_kernel(system: Machine) -> None:
    new = system.base.new
    offer(system, *kernel_files(system), *driver_files(VERSIONS[0]))
    said = system.apt("install", f"linux-image-{new}", f"linux-headers-{new}")
    ours = [line for line in said.splitlines() if line.startswith("gpuguard: ")]
    assert len(ours) == 1, said
    assert "looks at them as soon as apt is done" in ours[0]
    assert "do not reboot yet" in ours[0]
    stock = system.path(f"/lib/modules/{new}/updates/dkms")
    assert list(stock.glob("nvidia.ko*")), "dkms has built stock"
    wait_until_ready(system, new)
    status = system.status()
    assert status["next_kernel"]["release"] == new == system.boot_loader_starts()
    assert status["reboot"]["safe"] is True
    assert f"{new}: patched modules built and in place" in system.journal("-u", REBUILD)


def test_a_kernel_that_apt_removes_leaves_nothing_of_ours(system: Machine) -> None:
    new = system.base.new
    system.apt("purge", f"linux-image-{new}", f"linux-headers-{new}")
    system.wait_for(
        lambda: (
            not system.path(f"/etc/depmod.d/zz-gpuguard-{new}.conf").exists()
            and not system.path(f"/lib/modules/{new}").exists()
            and is_idle(system)
        ),
        120,
        f"nothing is left of {new}",
    )
    status = system.status()
    assert status["verdict"] == "ok", status["findings"]
    assert [k["release"] for k in status["kernels"]] == [system.base.old]


def test_dpkg_alone_brings_a_newer_kernel(system: Machine) -> None:
    files = [f"{ARCHIVE}/{name}" for name in kernel_files(system)]
    system.run("dpkg", "-i", *files, timeout=300)
    wait_until_ready(system, system.base.new)
    assert system.status()["reboot"]["safe"] is True


def test_apt_brings_a_newer_driver(system: Machine) -> None:
    offer(system, *kernel_files(system), *driver_files(VERSIONS[1]))
    said = system.apt("install", *DRIVER_PACKAGES, timeout=600)
    assert said.count("\ngpuguard: ") == 1, said
    wait_until_ready(system, system.base.old, system.base.new)
    status = system.status()
    assert status["driver"]["userland"] == VERSIONS[1]
    modules = kernel(system, system.base.new)["modules"]
    assert {m["version"] for m in modules} == {VERSIONS[1]}
    assert {m["identity"] for m in modules} == {"patched"}
    assert status["reboot"]["required"] is True
    assert status["reboot"]["safe"] is True


def test_nothing_on_hold_changes_by_a_full_upgrade(system: Machine) -> None:
    new = system.base.new
    system.apt("purge", f"linux-image-{new}", f"linux-headers-{new}")
    assert system.gpuguard("hold", check=True).returncode == 0
    held = set(system.run("apt-mark", "showhold").stdout.split())
    assert {*METAS, *DRIVER_PACKAGES, f"linux-image-{system.base.old}"} <= held
    offer(system, *metas(system), *kernel_files(system), *driver_files(VERSIONS[2]))
    said = system.apt("dist-upgrade")
    assert "\n0 upgraded, 0 newly installed, 0 to remove" in said
    holds = json.loads(system.gpuguard("--json", "holds").stdout)
    withheld = {package["name"]: package["candidate"] for package in holds["withheld"]}
    assert withheld[DKMS_PACKAGE] == f"{VERSIONS[2]}-1"
    assert withheld[METAS[0]] == system.base.new_version


def test_a_maintenance_window_brings_kernel_and_driver(system: Machine) -> None:
    held = set(system.run("apt-mark", "showhold").stdout.split())
    done = system.gpuguard("upgrade")
    assert done.returncode == 0, done.stdout + done.stderr
    after = set(system.run("apt-mark", "showhold").stdout.split())
    assert held | {f"linux-image-{system.base.new}"} <= after
    status = system.status()
    assert status["reboot"]["safe"] is True
    assert status["next_kernel"]["release"] == system.base.new
    assert status["driver"]["userland"] == VERSIONS[2]
    assert window(system)["phase"] == "waiting-for-boot"


def test_the_gate_proves_the_new_kernel_and_closes_the_window(system: Machine) -> None:
    assert system.reboot() == system.base.new
    assert pass_gate(system)["driver"] == VERSIONS[2]
    assert system.systemctl("is-active", "gpuguard-verify") == "active"
    closed = window(system)
    assert closed["phase"] == "closed"
    assert closed["verdict"] in PROVEN
    assert DKMS_PACKAGE in {change["name"] for change in closed["changes"]}
    assert "is closed, P2P is proven" in system.journal("-u", "gpuguard-verify")
    status = system.status()
    assert status["verdict"] == "ok", status["findings"]
    assert system.systemctl("is-system-running") == "running"


def test_removal_leaves_a_stock_system_that_apt_can_work_on(system: Machine) -> None:
    done = system.gpuguard("setup", "--remove", "--roll-back")
    assert done.returncode == 0, done.stdout + done.stderr
    assert system.systemctl("list-unit-files", "gpuguard*", "--no-legend", check=False) == ""
    for release in (system.base.old, system.base.new):
        winner = system.run("modinfo", "-k", release, "-F", "filename", "nvidia").stdout
        assert "/updates/dkms/" in winner
    assert "packages on hold" in done.stdout  # the operator lifts them, and is told how
    system.gpuguard("unhold", check=True)
    assert system.run("apt-mark", "showhold").stdout == ""
    said = system.apt("purge", "nvidia-driver")
    assert "gpuguard" not in said
    assert system.systemctl("is-system-running") == "running"


def pass_gate(system: Machine) -> dict[str, Any]:
    """Start the gate, which must open; what it keeps as the proof of this boot."""
    system.systemctl("start", "gpuguard-verify")
    proof = dict(json.loads(system.live_path("/run/gpuguard/proof.json").read_text()))
    assert proof["pairs"] == 12
    assert proof["verdict"] in PROVEN
    return proof


def window(system: Machine) -> dict[str, Any]:
    """The last maintenance window, as the history tells it."""
    done = system.gpuguard("--json", "upgrade", "--history", check=True)
    return dict(json.loads(done.stdout)["windows"][-1])
