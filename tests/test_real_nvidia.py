"""The real thing: NVIDIA's source, Debian's kernels and dkms, in a root of its own.

Stock modules are built by the real dkms for two real kernels; gpuguard rebuilds them from the
full source with a patch in ``src/nvidia``; DKMS rebuilds and does not undo it; a third kernel,
on which this source does not compile, leaves everything as it was. The tests are stages of
one story and run in this order, on one root.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import realroot
from tests.realroot import RealParts, chroot, gpuguard
from tests.toys import snapshot

pytestmark = pytest.mark.slow

MARKER = "gpuguard test patch of the operating-system-agnostic core"
PATCHED_FILE = "src/nvidia/arch/nvalloc/unix/src/osinit.c"
OLD_MESSAGE = "GPU has fallen off the bus."
MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem")


@dataclass
class Story:
    """The root, the kernels in it, and what earlier stages found out."""

    root: Path
    parts: RealParts
    lab: realroot.Lab
    stock: dict[str, dict[str, str]]

    def status(self) -> dict[str, Any]:
        done = gpuguard(self.root, "--json", "status")
        assert done.stdout, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def kernel(self, release: str) -> dict[str, Any]:
        return next(k for k in self.status()["kernels"] if k["release"] == release)

    def resolved(self, release: str) -> Path:
        """What the root's own modprobe would load as nvidia."""
        command = ("modprobe", "-S", release, "-i", "--show-depends", "nvidia-current-open")
        last = chroot(self.root, *command).stdout.split("\n")[-2]
        return self.root / last.split()[1][1:]

    def state(self, release: str) -> dict[str, str]:
        """Everything that a boot into a kernel would read, for exact comparisons."""
        tree = snapshot(self.root / "lib/modules" / release)
        depmod = snapshot(self.root / "etc/depmod.d")
        boot = {p: d for p, d in snapshot(self.root / "boot").items() if release in p}
        return tree | depmod | boot


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    reason = _missing()
    if reason:
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    cache = realroot.cache_dir()
    lab = realroot.Lab(cache / "apt")
    lab.update()
    parts = realroot.choose_parts(lab.names("linux-headers-6.1.0"))
    if parts is None:
        pytest.skip(
            f"the archive no longer has two of {realroot.COMPILES} and one of "
            f"{realroot.DOES_NOT_COMPILE}: find new ones with `apt-cache pkgnames linux-headers-`"
        )
    realroot.make_root(lab, parts, cache / "realroot")
    source = realroot.nvidia_source(lab, cache / "nvidia-source")
    work = tmp_path_factory.mktemp("real")
    with realroot.working_copy(cache / "realroot", work) as root:
        realroot.install_gpuguard(root)
        _configure(root, source)
        stock = {release: _build_ids(root, release) for release in (parts.old, parts.new)}
        with realroot.mounted(root):
            yield Story(root, parts, lab, stock)


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "needs root for mmdebstrap and chroot: sudo make test"
    if realroot.suite() != "bookworm":
        return "the known kernels and source are Debian 12's"
    if shutil.which("mmdebstrap") is None:
        return "apt install mmdebstrap"
    return None


def _configure(root: Path, source: Path) -> None:
    shutil.copytree(source, root / "srv/nvidia", symlinks=True)
    patches = root / "etc/gpuguard/patches"
    patches.mkdir(parents=True)
    (patches / "marker.patch").write_text(_make_patch(source))
    (root / "etc/gpuguard/gpuguard.yaml").write_text(
        "source:\n  path: /srv/nvidia\n  patches: [/etc/gpuguard/patches/marker.patch]\n"
    )
    command = ("useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin")
    chroot(root, *command, "gpuguard-build")
    # one kernel's initramfs carries the modules, the other's does not
    (root / "etc/initramfs-tools/modules").write_text("")


def _make_patch(source: Path) -> str:
    """One string of the core object: what nothing refers to would be dropped by the linker."""
    text = (source / PATCHED_FILE).read_text()
    assert text.count(f'"{OLD_MESSAGE}"') == 1
    before = text.splitlines(keepends=True)
    after = text.replace(f'"{OLD_MESSAGE}"', f'"{MARKER}"').splitlines(keepends=True)
    names = (f"a/{PATCHED_FILE}", f"b/{PATCHED_FILE}")
    return "".join(difflib.unified_diff(before, after, *names))


def _build_ids(root: Path, release: str) -> dict[str, str]:
    found = {}
    for path in sorted((root / "lib/modules" / release / "updates/dkms").glob("nvidia*.ko")):
        text = subprocess.run(["readelf", "-n", path], check=True, text=True, capture_output=True)
        found[path.name] = text.stdout.split("Build ID:")[1].split()[0]
    return found


def test_dkms_built_stock_and_status_is_red(story: Story) -> None:
    assert len(story.stock[story.parts.old]) == len(MODULES)
    document = story.status()
    assert document["verdict"] == "critical"
    codes = {finding["code"] for finding in document["findings"]}
    assert "next-kernel-stock" in codes
    for kernel in document["kernels"]:
        assert {module["identity"] for module in kernel["modules"]} == {"stock"}
        ids = {module["build_id"] for module in kernel["modules"]}
        assert ids == set(story.stock[kernel["release"]].values())


def test_first_rebuild_builds_the_core_and_wins(story: Story) -> None:
    before = _build_ids(story.root, story.parts.old)
    done = gpuguard(story.root, "rebuild", "--kernel", story.parts.old)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "to be built because" in done.stderr
    kernel = story.kernel(story.parts.old)
    assert kernel["ready"] is True
    winner = story.resolved(story.parts.old)
    assert winner.parent.name == "gpuguard"
    assert MARKER.encode() in winner.read_bytes()
    info = chroot(story.root, "modinfo", "/" + str(winner.relative_to(story.root))).stdout
    assert f"vermagic:       {story.parts.old} " in info
    assert f"version:        {realroot.driver_version(story.root)}\n" in info
    assert "DKMS module signing key" in info
    assert _build_ids(story.root, story.parts.old) == before  # DKMS's own files are untouched


def test_second_kernel_uses_the_cached_core_and_renews_its_initramfs(story: Story) -> None:
    new = story.parts.new
    (story.root / "etc/initramfs-tools/modules").write_text("nvidia-current-open\n")
    chroot(story.root, "update-initramfs", "-u", "-k", new)
    (story.root / "etc/initramfs-tools/modules").write_text("nvidia-current-open\n")
    other_image = (story.root / f"boot/initrd.img-{story.parts.old}").read_bytes()
    assert story.kernel(new)["initramfs"] == "current"  # stock inside, stock resolves
    done = gpuguard(story.root, "rebuild")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cached" in done.stderr
    kernel = story.kernel(new)
    assert kernel["ready"] is True
    assert kernel["initramfs"] == "current"
    listing = chroot(story.root, "lsinitramfs", f"/boot/initrd.img-{new}").stdout
    assert "updates/gpuguard/nvidia-current-open.ko" in listing
    unpacked = story.root / "tmp/initramfs"
    chroot(story.root, "unmkinitramfs", f"/boot/initrd.img-{new}", "/tmp/initramfs")
    inside = next(unpacked.rglob("nvidia-current-open.ko"))
    assert MARKER.encode() in inside.read_bytes()
    assert (story.root / f"boot/initrd.img-{story.parts.old}").read_bytes() == other_image
    assert story.status()["reboot"]["safe"] is True


def test_a_stock_rebuild_by_dkms_does_not_undo_it(story: Story) -> None:
    new = story.parts.new
    version = realroot.driver_version(story.root)
    dkms = ("-m", "nvidia-current-open", "-v", version, "-k", new)
    chroot(story.root, "dkms", "build", "--force", *dkms, timeout=3600)
    chroot(story.root, "dkms", "install", "--force", *dkms)
    assert _build_ids(story.root, new).keys() == story.stock[new].keys()
    assert MARKER.encode() in story.resolved(new).read_bytes()
    assert story.kernel(new)["ready"] is True


def test_rollback_and_back(story: Story) -> None:
    new = story.parts.new
    before = story.state(new)
    done = gpuguard(story.root, "rollback", "--kernel", new)
    assert done.returncode == 0, done.stdout + done.stderr
    kernel = story.kernel(new)
    assert {m["build_id"] for m in kernel["modules"]} == set(story.stock[new].values())
    assert kernel["initramfs"] == "current"
    assert gpuguard(story.root, "rollback", "--kernel", new).returncode == 0
    assert story.kernel(new)["ready"] is True
    after = story.state(new)
    images = {path for path in before if "initrd" in path}
    assert {p: d for p, d in after.items() if p not in images} == {
        p: d for p, d in before.items() if p not in images
    }


def test_a_kernel_on_which_it_does_not_compile(story: Story) -> None:
    broken = story.parts.broken
    packages = [f"linux-{kind}-{broken}" for kind in ("headers", "image")]
    common = f"linux-headers-{broken.removesuffix('-amd64')}-common"
    for file in story.lab.download(common, *packages):
        shutil.copy(file, story.root / "tmp")
    names = [f"/tmp/{p.name}" for p in (story.root / "tmp").glob("linux-*.deb")]
    # dkms's own hook fails on this kernel, too: that is what the operator would see
    chroot(story.root, "dpkg", "-i", *names, timeout=3600, check=False)
    assert story.status()["next_kernel"]["release"] == broken
    before = story.state(broken)
    others = story.state(story.parts.new)
    done = gpuguard(story.root, "rebuild")
    assert done.returncode == 70, done.stdout + done.stderr
    assert "error:" in done.stderr
    assert "pci_resize_resource" in done.stderr
    assert story.state(broken) == before
    assert story.state(story.parts.new) == others
    document = story.status()
    findings = [f for f in document["findings"] if f["subject"] == broken]
    assert "build-failed" in {f["code"] for f in findings}
    assert any(f"boot {story.parts.new}" in f["remedy"] for f in findings)
    assert document["reboot"]["safe"] is False
    again = gpuguard(story.root, "rebuild")
    assert "--force tries again" in again.stdout
