"""A virtual machine that upgrades its kernel and reboots into it.

Three boots of one disk: the old kernel with patched modules; the new one, for which nobody has
rebuilt (thrown away again); the new one after the rebuild. In each the module is loaded by a
real kernel, the gate runs as a unit, and another unit depends on it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import booted_roots, vm
from tests.booted_roots import CONFIG, PROGRAM, RELEASES, Base
from tests.realroot import chroot, mounted

pytestmark = [pytest.mark.slow, pytest.mark.vm]

_CONFIG = "/etc/gpuguard/gpuguard.yaml"
_BOOT_SECONDS = 600.0  # of software emulation on a busy machine


@dataclass(frozen=True)
class Story:
    """The disk, and what is on it."""

    base: Base
    disk: vm.Disk
    folder: Path

    def build_ids(self, release: str) -> dict[str, str]:
        """What nvidia.ko on the disk is ("patched", "stock"), and its build-id."""
        with self.disk.mounted() as there:
            done = there.run(PROGRAM, "--json", "status", check=False)
        kernel = next(k for k in json.loads(done.stdout)["kernels"] if k["release"] == release)
        module = next(m for m in kernel["modules"] if m["name"] == "nvidia")
        return {module["identity"]: module["build_id"]}


@pytest.fixture(scope="module", params=RELEASES[:1], ids=lambda debian: debian.suite)
def story(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    if reason := booted_roots.missing() or vm.missing():
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    base = booted_roots.get_base(request.param)
    folder = tmp_path_factory.mktemp(f"vm-{request.param.suite}")
    with booted_roots.overlay(base.layers, folder) as root:
        booted_roots.install_gpuguard(root, booted_roots.build_wheel(folder))
        with mounted(root):
            chroot(root, PROGRAM, "setup")
            chroot(root, PROGRAM, "rebuild")
        disk = vm.make_disk(root, folder)
    yield Story(base, disk, folder)
    shutil.rmtree(folder)  # gigabytes


def test_the_old_kernel_loads_the_patched_module_and_serves(story: Story) -> None:
    expected = story.build_ids(story.base.old)
    with vm.boot(story.disk, story.folder / "old.log") as guest:
        report = guest.report(_BOOT_SECONDS)
        assert report["kernel"] == story.base.old
        assert {"patched": report["build_id"]} == expected
        assert report["gate"] == "active", guest.ask("/journal")
        guest.wait_for("serving", "active")
        guest.power_off()


def test_the_new_kernel_without_a_rebuild_shuts_the_gate_and_stays_reachable(story: Story) -> None:
    new = story.base.new
    with story.disk.mounted() as there:
        # nobody rebuilds, as on a host without gpuguard
        config = there.root / _CONFIG.lstrip("/")
        config.write_text(f"{CONFIG}automatic:\n  rebuild: false\n")
        booted_roots.publish(there.root, *booted_roots.kernel_files(there.root))
        there.run("apt-get", "-q", "update")
        packages = (f"linux-image-{new}", f"linux-headers-{new}")
        said = there.run("apt-get", "-qy", "install", *packages).stdout
        assert "before this system is booted: gpuguard rebuild" in said
        there.run("update-grub")
    expected = story.build_ids(new)
    with vm.boot(story.disk, story.folder / "stock.log", snapshot=True) as guest:
        report = guest.report(_BOOT_SECONDS)
        assert report["kernel"] == new
        assert {"stock": report["build_id"]} == expected
        assert report["gate"] == "failed"
        guest.wait_for("multi_user", "active")  # the gate holds nobody else up
        guest.wait_for("serving", "inactive", timeout=0)
        status = guest.status()
        assert status["verdict"] == "critical"
        assert status["driver"]["loaded_identity"] == "stock"


def test_the_new_kernel_after_the_rebuild_is_proven_and_serves(story: Story) -> None:
    new = story.base.new
    with story.disk.mounted() as there:
        (there.root / _CONFIG.lstrip("/")).write_text(CONFIG)
        done = there.run(PROGRAM, "rebuild", check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    expected = story.build_ids(new)
    with vm.boot(story.disk, story.folder / "new.log") as guest:
        report = guest.report(_BOOT_SECONDS)
        assert report["kernel"] == new
        assert {"patched": report["build_id"]} == expected
        assert report["gate"] == "active", guest.ask("/journal")
        guest.wait_for("serving", "active")
        status = guest.status()
        assert status["driver"]["loaded_identity"] == "patched"
        assert status["reboot"]["safe"] is True
        guest.power_off()
