"""The demo kit: a stand-in source that really builds, real headers, a host tree.

Out of scope: what gpuguard itself makes of such a tree.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuguard.core.facts import MODULE_NAMES
from gpuguard.demo import dkms
from gpuguard.demo.bootloader import grub_config, write_grubenv
from gpuguard.demo.headers import HeadersCache, choose_series, get_headers, header_paths, source_dir
from gpuguard.demo.kernels import add_kernel, cpio_archive, remove_kernel
from gpuguard.demo.source import (
    P2P_PATCH,
    STANDIN,
    VERSION,
    apply_patch,
    build_modules,
    copy_standin,
)
from gpuguard.demo.tree import make_tree
from gpuguard.errors import CommandError, PreflightError
from gpuguard.host import LocalHost
from tests import live
from tests.kit import HostTree, modinfo, stock_module

PatchedModules = Callable[[str], Path]
# --- the source tree ------------------------------------------------------------------------


def test_patch_fits_without_fuzz_and_changes_core_and_kernel_part(tmp_path: Path) -> None:
    source = copy_standin(tmp_path / "source")
    apply_patch(source)
    changed = {
        str(file.relative_to(STANDIN))
        for file in STANDIN.rglob("*")
        if file.is_file() and file.read_bytes() != (source / file.relative_to(STANDIN)).read_bytes()
    }
    assert changed == {"kernel-open/nvidia/nv-pci.c", "src/nvidia/src/p2p_policy.c"}
    with pytest.raises(CommandError):
        apply_patch(source, P2P_PATCH)


def test_a_copy_of_another_version_says_so_in_both_places(tmp_path: Path) -> None:
    source = copy_standin(tmp_path / "source", version="999.10.02")
    assert (source / "version.mk").read_text() == "NVIDIA_VERSION = 999.10.02\n"
    assert '"999.10.02' in (source / "kernel-open/Kbuild").read_text().replace("\\", "")
    assert VERSION not in (source / "kernel-open/Kbuild").read_text()


def test_modules_build_for_each_kernel(tmp_path: Path, kernel_headers: HeadersCache) -> None:
    for release in kernel_headers.releases:
        source = copy_standin(tmp_path / release)
        built = build_modules(source, kernel_headers.root, release)
        for name in MODULE_NAMES:
            module = built / f"{name}.ko"
            assert modinfo(module, "vermagic").split()[0] == release
            assert "modversions" in modinfo(module, "vermagic")
            assert modinfo(module, "version") == VERSION
            assert modinfo(module, "license") == "Dual MIT/GPL"
        assert b"standin-p2p-policy=chipset-not-supported" in (built / "nvidia.ko").read_bytes()
        depends = {name: modinfo(built / f"{name}.ko", "depends") for name in MODULE_NAMES}
        assert depends == {
            "nvidia": "",
            "nvidia-uvm": "nvidia",
            "nvidia-modeset": "nvidia",
            "nvidia-drm": "nvidia-modeset",
            "nvidia-peermem": "nvidia",
        }


def test_a_build_leaves_the_headers_as_they_are(
    tmp_path: Path, kernel_headers: HeadersCache
) -> None:
    release = kernel_headers.releases[0]
    folders = tuple(
        str(kernel_headers.root / path) for path in header_paths(kernel_headers.root, release)
    )
    before = live.snapshot(folders)
    build_modules(copy_standin(tmp_path / "source"), kernel_headers.root, release)
    assert live.differences(before, live.snapshot(folders)) == []


def test_patched_module_differs_in_what_its_core_says(
    kernel_headers: HeadersCache, patched_modules: PatchedModules
) -> None:
    content = (patched_modules(kernel_headers.releases[0]) / "nvidia.ko").read_bytes()
    assert b"standin-p2p-policy=ok" in content
    assert b"chipset-not-supported" not in content


# --- headers --------------------------------------------------------------------------------


def test_series_of_the_distribution_comes_first() -> None:
    packages = [
        "linux-headers-6.1.0-9-amd64", "linux-headers-6.1.0-10-amd64",
        "linux-headers-6.1.0-10-rt-amd64", "linux-headers-6.1.0-10-cloud-amd64",
        "linux-headers-6.1.0-10-common", "linux-headers-6.12-amd64", "linux-headers-amd64",
        "linux-headers-6.12.90+deb12-amd64", "linux-headers-6.12.90+deb12.1-amd64",
    ]  # fmt: skip
    assert choose_series(packages, ["6.1.0-10-amd64"], 2) == ("6.1.0-9-amd64", "6.1.0-10-amd64")
    newest = ("6.12.90+deb12-amd64", "6.12.90+deb12.1-amd64")
    assert choose_series(packages, [], 2) == newest
    assert choose_series(packages, [], 3) == ()


def test_ubuntu_names_are_known() -> None:
    packages = [f"linux-headers-6.8.0-{abi}{flavour}" for abi in (9, 90, 100)
                for flavour in ("", "-generic", "-lowlatency")]  # fmt: skip
    assert choose_series(packages, [], 2) == (
        "6.8.0-9-generic", "6.8.0-90-generic", "6.8.0-100-generic"
    )  # fmt: skip


def test_cached_headers_need_no_apt(kernel_headers: HeadersCache, tmp_path: Path) -> None:
    said: list[str] = []
    again = get_headers(kernel_headers.root, releases=kernel_headers.releases, say=said.append)
    assert again == kernel_headers
    assert said == []


def test_unknown_release_is_refused_with_a_remedy(
    tmp_path: Path, kernel_headers: HeadersCache
) -> None:
    with pytest.raises(PreflightError, match=r"linux-headers-1\.2\.3-amd64") as raised:
        get_headers(tmp_path, releases=["1.2.3-amd64"])
    assert "apt-get update" in raised.value.hint
    assert not (tmp_path / "lib").exists()


def test_cache_is_laid_out_like_a_root(kernel_headers: HeadersCache) -> None:
    for release in kernel_headers.releases:
        link = (kernel_headers.root / "lib/modules" / release / "build").readlink()
        assert link == Path(f"/usr/src/linux-headers-{release}")
        assert (kernel_headers.root / source_dir(kernel_headers.root, release)).is_dir()


# --- the tree -------------------------------------------------------------------------------


def test_tree_runs_the_older_kernel_and_will_start_the_newest(
    host_tree: HostTree, kernel_headers: HeadersCache
) -> None:
    root = host_tree()
    old, new = kernel_headers.releases
    assert (root / "proc/sys/kernel/osrelease").read_text() == f"{old}\n"
    config = (root / "boot/grub/grub.cfg").read_text()
    assert config.index(f"vmlinuz-{new}") < config.index(f"vmlinuz-{old}")
    assert (root / "vmlinuz").readlink() == Path(f"boot/vmlinuz-{new}")
    assert (root / "vmlinuz.old").readlink() == Path(f"boot/vmlinuz-{old}")
    assert (root / "boot/grub/grubenv").stat().st_size == 1024
    packages = LocalHost().run(
        "dpkg-query", "--admindir", str(root / "var/lib/dpkg"), "-W", timeout=10
    ).stdout  # fmt: skip
    assert f"linux-image-{new}" in packages


def test_kernels_come_and_go(host_tree: HostTree, kernel_headers: HeadersCache) -> None:
    old, new = kernel_headers.releases
    root = host_tree(kernels=1, stock=False)
    assert new not in (root / "boot/grub/grub.cfg").read_text()
    add_kernel(root, new, kernel_headers.root)
    assert (root / "vmlinuz").readlink() == Path(f"boot/vmlinuz-{new}")
    assert "gpuguard_sample.ko:" in (root / "lib/modules" / new / "modules.dep").read_text()
    remove_kernel(root, new)
    assert (root / "vmlinuz").readlink() == Path(f"boot/vmlinuz-{old}")
    assert not (root / "vmlinuz.old").exists()
    assert not (root / "lib/modules" / new).exists()
    assert (root / "usr/src" / f"linux-headers-{old}" / "scripts/mod/modpost").exists()


@pytest.mark.parametrize("suffix", [".xz", ".zst"])
def test_kernels_own_modules_can_be_compressed(
    tmp_path: Path, kernel_headers: HeadersCache, suffix: str
) -> None:
    release = kernel_headers.releases[0]
    root = make_tree(tmp_path / "host", kernel_headers, releases=[release], suffix=suffix)
    dependencies = (root / "lib/modules" / release / "modules.dep").read_text()
    assert f"gpuguard_sample.ko{suffix}:" in dependencies


def test_copies_are_fast_and_apart(host_tree: HostTree, kernel_headers: HeadersCache) -> None:
    first = host_tree(name="first")
    release = kernel_headers.releases[0]
    started = time.monotonic()
    second = host_tree(name="second")
    assert time.monotonic() - started < 5  # 0.4 s on a quiet machine
    for path in ("boot/grub/grubenv", f"usr/src/linux-headers-{release}/.config"):
        (first / path).write_text("changed in place")
        assert (second / path).read_text() != "changed in place"
    stock_module(first, release).write_bytes(b"")
    assert stock_module(second, release).stat().st_size > 0


def test_copied_tree_can_be_built_on(host_tree: HostTree, kernel_headers: HeadersCache) -> None:
    root = host_tree()
    release = kernel_headers.releases[1]
    dkms.dkms_remove(root, release)
    assert not stock_module(root, release).exists()
    dkms.dkms_autoinstall(root, release)
    assert modinfo(stock_module(root, release), "vermagic").startswith(release)


def test_grub_follows_its_environment_where_the_default_is_saved(tmp_path: Path) -> None:
    text = grub_config("Debian GNU/Linux", ["6.1.0-9-amd64", "6.1.0-10-amd64"], default="saved")
    assert 'set default="${saved_entry}"' in text
    assert text.index("6.1.0-10-amd64") < text.index("6.1.0-9-amd64")
    write_grubenv(tmp_path, saved_entry="1>2")
    block = (tmp_path / "boot/grub/grubenv").read_text()
    assert "saved_entry=1>2\n#" in block
    assert len(block) == 1024


def test_initial_ram_disk_is_a_cpio_archive(tmp_path: Path) -> None:
    if shutil.which("cpio") is None:
        pytest.skip("cpio is missing; apt-get install cpio")
    archive = tmp_path / "initrd"
    archive.write_bytes(cpio_archive({"init": b"#!/bin/sh\n", "b": b"x"}))
    assert LocalHost().run("cpio", "-t", stdin=archive, timeout=10).stdout.split() == ["init", "b"]
