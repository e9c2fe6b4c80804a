"""Kernels, their images and compression, and dpkg's packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuguard.errors import ProbeError
from gpuguard.host import LocalHost
from gpuguard.host.reading import read_bytes, read_text
from gpuguard.probes.dpkg import parse_status, read_packages
from gpuguard.probes.kernels import is_release, probe_releases, probe_running, probe_suffix
from tests.trees import Link, make_tree
from tests.unprivileged import as_nobody, public_dir


def test_union_of_trees_and_images_in_dpkg_order(tmp_path: Path) -> None:
    make_tree(
        tmp_path,
        {
            "/boot/vmlinuz-6.8.0-9-generic": "i",
            "/boot/vmlinuz-6.8.0-100-generic": "i",
            "/boot/vmlinuz-6.8.0-90-lowlatency": "i",
            "/boot/vmlinuz-6.12.90+deb13.1-amd64": "i",
            "/boot/vmlinuz-6.12.90+deb13-amd64": "i",
            "/boot/vmlinuz-7.0.0-28-generic.old": "i",
            "/boot/vmlinuz-7.0.0-28-generic.dpkg-new": "i",
            "/boot/vmlinuz-0-rescue-5f3a": "i",
            "/boot/vmlinuz-6.8.0-1-gone": Link("vmlinuz-nowhere"),
            "/boot/vmlinuz": Link("vmlinuz-6.8.0-9-generic"),
            "/lib": Link("usr/lib"),
            "/usr/lib/modules/6.8.0-90-generic/updates/dkms/nvidia.ko": "m",  # left over
            "/usr/lib/modules/6.8.0-100-generic/modules.dep": "",
            "/usr/lib/modules/7.1.2-ostree/vmlinuz": "i",
            "/usr/lib/modules/extramodules": None,
            "/usr/lib/modules/6.6.6": "a file",
        },
    )
    assert probe_releases(LocalHost(tmp_path)) == (
        ("6.8.0-9-generic", "/boot/vmlinuz-6.8.0-9-generic"),
        ("6.8.0-90-generic", None),
        ("6.8.0-90-lowlatency", "/boot/vmlinuz-6.8.0-90-lowlatency"),
        ("6.8.0-100-generic", "/boot/vmlinuz-6.8.0-100-generic"),
        ("6.12.90+deb13-amd64", "/boot/vmlinuz-6.12.90+deb13-amd64"),
        ("6.12.90+deb13.1-amd64", "/boot/vmlinuz-6.12.90+deb13.1-amd64"),
        ("7.1.2-ostree", "/lib/modules/7.1.2-ostree/vmlinuz"),
    )


def test_lib_that_is_not_merged(tmp_path: Path) -> None:
    make_tree(tmp_path, {"/lib/modules/5.10.0-1-amd64": None, "/usr/lib/modules": None})
    assert probe_releases(LocalHost(tmp_path)) == (("5.10.0-1-amd64", None),)


def test_empty_root(tmp_path: Path) -> None:
    assert probe_releases(LocalHost(tmp_path)) == ()
    assert probe_running(LocalHost(tmp_path)) is None
    assert read_packages(LocalHost(tmp_path)) == {}


def test_closed_boot_is_an_error_not_a_leftover_kernel() -> None:
    with public_dir() as root:
        make_tree(root, {"/boot/vmlinuz-6.1.0-1": "i", "/lib/modules/6.1.0-1": None})
        (root / "boot").chmod(0o700)
        with as_nobody(), pytest.raises(ProbeError, match="/boot cannot be read"):
            probe_releases(LocalHost(root))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("6.1.0-47-amd64", True), ("6.17.2", True), ("7.0.0-rc3+", True), ("6.1", True),
        ("0-rescue-1234", False), ("generic", False), ("6.1.0-47-amd64.old", False),
        ("6.1.0 x", False), ("..", False), ("", False), ("6.1.0/..", False),
    ],
)  # fmt: skip
def test_release_names(name: str, answer: bool) -> None:
    assert is_release(name) is answer


def test_running_kernel_is_the_roots_own(tmp_path: Path) -> None:
    make_tree(tmp_path, {"/proc/sys/kernel/osrelease": "6.8.0-90-generic\n"})
    assert probe_running(LocalHost(tmp_path)) == "6.8.0-90-generic"


def test_running_kernel_of_this_machine() -> None:
    # A single large read of a sysctl file fails with ENOMEM.
    osrelease = Path("/proc/sys/kernel/osrelease").read_text().strip()
    assert probe_running(LocalHost()) == osrelease


@pytest.mark.parametrize("suffix", ["", ".xz", ".zst", ".gz"])
def test_suffix_of_the_kernels_own_modules(tmp_path: Path, suffix: str) -> None:
    tree = "/lib/modules/6.8.0-90-generic"
    make_tree(
        tmp_path,
        {
            f"{tree}/kernel/nvidia-580-open/nvidia.ko": "m",
            f"{tree}/kernel/nvidia-580-open/nvidia-drm.ko": "m",
            f"{tree}/updates/dkms/nvidia.ko": "m",
            f"{tree}/kernel/fs/ext4/ext4.ko{suffix}": "m",
            f"{tree}/kernel/fs/readme.ko.txt": "m",
        },
    )
    assert probe_suffix(LocalHost(tmp_path), "6.8.0-90-generic") == suffix


def test_suffix_of_a_kernel_without_modules(tmp_path: Path) -> None:
    assert probe_suffix(LocalHost(tmp_path), "6.8.0-90-generic") == ""


STATUS = """\
Package: dpkg
Status: install ok installed
Architecture: amd64
Version: 1.21.22

Package: libnvidia-ml1
Status: hold ok installed
Architecture: amd64
Multi-Arch: same
Version: 535.261.03-1~deb12u1
Description: NVML
 Package: not-a-package
 Version: 9
 .
 more

Package: libnvidia-ml1
Status: install ok installed
Architecture: i386
Version: 535.261.03-1

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1

Package: broken
Status: what

nonsense
"""


def test_packages(tmp_path: Path) -> None:
    make_tree(tmp_path, {"/var/lib/dpkg/status": STATUS})
    packages = read_packages(LocalHost(tmp_path))
    assert sorted(packages) == ["dpkg", "gone", "libnvidia-ml1", "libnvidia-ml1:i386"]
    ours = packages["libnvidia-ml1"]
    assert (ours.version, ours.selection, ours.architecture) == (
        "535.261.03-1~deb12u1", "hold", "amd64",
    )  # fmt: skip
    assert ours.is_installed
    assert not packages["gone"].is_installed


def test_packages_that_dpkg_is_working_on(tmp_path: Path) -> None:
    newer = STATUS.replace("hold ok installed", "install ok half-configured")
    make_tree(
        tmp_path,
        {
            "/var/lib/dpkg/status": STATUS,
            "/var/lib/dpkg/updates/0001": newer.split("\n\n")[1] + "\n",
            "/var/lib/dpkg/updates/tmp.i": "Package: x\nStatus: install ok installed\n",
        },
    )
    packages = read_packages(LocalHost(tmp_path))
    assert packages["libnvidia-ml1"].status == "half-configured"
    assert "x" not in packages


def test_packages_are_those_of_dpkg_query_here() -> None:
    host = LocalHost()
    if not host.has_program("dpkg-query"):
        pytest.skip("no dpkg here")
    asked = host.run(
        "dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Status}\n", timeout=20
    )
    ours = {f"{p.name} {p.version} {p.status}" for p in read_packages(host).values()}
    assert ours == {line.strip() for line in asked.stdout.splitlines()}


def test_status_garbage() -> None:
    assert list(parse_status("\x00\xff" * 1000 + "\n\n\n\n::\n")) == []


def test_reading_tells_absent_from_unreadable(tmp_path: Path) -> None:
    make_tree(tmp_path, {"/a": "x", "/loop": Link("loop"), "/bytes": b"\xff\xfe"})
    host = LocalHost(tmp_path)
    assert read_bytes(host, "/a/below") is None
    assert read_bytes(host, "/nothing/there") is None
    assert read_text(host, "/bytes") == "\ufffd\ufffd"
    with pytest.raises(ProbeError, match="/loop cannot be read"):
        read_bytes(host, "/loop")
    with pytest.raises(ProbeError, match="longer than 0 bytes"):
        read_bytes(host, "/a", max_bytes=0)
