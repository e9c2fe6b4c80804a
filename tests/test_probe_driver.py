"""Driver versions: libraries, packages, the loaded module."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from gpuguard.core.facts import DriverFacts
from gpuguard.errors import ProbeError
from gpuguard.host import LocalHost
from gpuguard.probes.driver import (
    library_folders,
    parse_driver_version,
    parse_package_version,
    probe_driver,
)
from tests.trees import Link, make_tree
from tests.unprivileged import as_nobody, public_dir

LIB = "/usr/lib/x86_64-linux-gnu"
BUILD_ID = bytes(range(20))
NOTE = struct.pack("<III4s", 4, 20, 3, b"GNU\0") + BUILD_ID


NVRM = "NVRM version: NVIDIA UNIX "
OPEN = f"{NVRM}Open Kernel Module for x86_64  "
GCC = "\nGCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            f"{NVRM}x86_64 Kernel Module  520.56.06  Thu Oct  6 21:38:55 UTC 2022{GCC}",
            ("520.56.06", "proprietary"),
        ),
        (
            f"{OPEN}565.57.01  Release Build  (builder@host)  Thu Oct 10 12:15:00 UTC 2024{GCC}",
            ("565.57.01", "open"),
        ),
        (f"{OPEN}525.60.11  Release Build  (builder@localhost)\n", ("525.60.11", "open")),
        # as captured from two H200 with driver 580
        (f"{OPEN}580.159.04  Release Build  (nixbld@)  {GCC}", ("580.159.04", "open")),
        (f"{NVRM}Open Kernel Module for aarch64  590.48\n", ("590.48", "open")),
        (f"{NVRM}x86_64 Kernel Module  Deprecated{GCC}", (None, None)),
        (GCC, (None, None)),
        ("", (None, None)),
        ("\x00\ufffd" * 100, (None, None)),
    ],
)
def test_version_file(text: str, answer: tuple[str | None, str | None]) -> None:
    assert parse_driver_version(text) == answer


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        ("535.261.03-1~deb12u1", "535.261.03"), ("580.95.05-0ubuntu0.24.04.1", "580.95.05"),
        ("1:570.124.06-1ubuntu1", "570.124.06"), ("590.48.01", "590.48.01"),
        ("470.256-1", "470.256"), ("Deprecated", None), ("", None), ("1", None),
    ],
)  # fmt: skip
def test_package_version(version: str, answer: str | None) -> None:
    assert parse_package_version(version) == answer


def test_library_of_ubuntu(tmp_path: Path) -> None:
    make_tree(
        tmp_path,
        {
            f"{LIB}/libnvidia-ml.so.570.124.04": "elf",
            f"{LIB}/libnvidia-ml.so.570.124.06": "elf",
            f"{LIB}/libnvidia-ml.so.1": Link("libnvidia-ml.so.570.124.06"),
        },
    )
    facts = probe_driver(LocalHost(tmp_path))
    assert facts == DriverFacts(
        userland="570.124.06", userland_source=f"{LIB}/libnvidia-ml.so.570.124.06"
    )
    assert library_folders(LocalHost(tmp_path)) == (LIB,)


def test_library_of_debian_behind_alternatives(tmp_path: Path) -> None:
    name = "nvidia--libnvidia-ml.so.1-x86_64-linux-gnu"
    make_tree(
        tmp_path,
        {
            f"{LIB}/libnvidia-ml.so.1": Link(f"/etc/alternatives/{name}"),
            f"/etc/alternatives/{name}": Link(f"{LIB}/nvidia/current/libnvidia-ml.so.1"),
            f"{LIB}/nvidia/current/libnvidia-ml.so.1": Link("libnvidia-ml.so.535.261.03"),
            f"{LIB}/nvidia/current/libnvidia-ml.so.535.261.03": "elf",
        },
    )
    facts = probe_driver(LocalHost(tmp_path))
    assert facts.userland == "535.261.03"
    assert facts.userland_source == f"{LIB}/nvidia/current/libnvidia-ml.so.535.261.03"


@pytest.mark.parametrize("folder", ["/usr/lib64", "/usr/lib/aarch64-linux-gnu", "/usr/lib"])
def test_library_elsewhere_without_its_link(tmp_path: Path, folder: str) -> None:
    make_tree(tmp_path, {f"{folder}/libnvidia-ml.so.550.163.01": "elf"})
    assert probe_driver(LocalHost(tmp_path)).userland == "550.163.01"


STATUS = """\
Package: {}
Status: {} ok installed
Architecture: amd64
Version: {}
"""


@pytest.mark.parametrize(
    "package",
    ["libnvidia-ml1", "libnvidia-compute-570", "libnvidia-compute", "nvidia-utils-570-server"],
)
def test_package_where_no_library_tells(tmp_path: Path, package: str) -> None:
    status = STATUS.format(package, "hold", "570.124.06-0ubuntu1")
    libraries = {  # two lie there, and no link says which one counts
        f"{LIB}/libnvidia-ml.so.1.2": "",
        f"{LIB}/libnvidia-ml.so.560.1": "",
        f"{LIB}/libnvidia-ml.so.570.1": "",
    }
    make_tree(tmp_path, {**libraries, "/var/lib/dpkg/status": status})
    facts = probe_driver(LocalHost(tmp_path))
    assert facts.userland == "570.124.06"
    assert facts.userland_source == f"package {package} 570.124.06-0ubuntu1"


@pytest.mark.parametrize("package", ["nvidia-utils-common", "libnvidia-container1"])
def test_packages_that_do_not_tell(tmp_path: Path, package: str) -> None:
    make_tree(tmp_path, {"/var/lib/dpkg/status": STATUS.format(package, "install", "570.1-1")})
    assert probe_driver(LocalHost(tmp_path)).userland is None


def test_loaded_module(tmp_path: Path) -> None:
    make_tree(
        tmp_path,
        {
            "/proc/driver/nvidia/version": f"{OPEN}580.159.04  Release Build  (nixbld@)\n",
            "/sys/module/nvidia/version": "580.159.04\n",
            "/sys/module/nvidia/notes/.note.gnu.build-id": NOTE,
        },
    )
    facts = probe_driver(LocalHost(tmp_path))
    assert (facts.loaded, facts.flavour) == ("580.159.04", "open")
    assert facts.loaded_build_id == BUILD_ID.hex()


@pytest.mark.parametrize("text", [None, "", "NVRM version: nonsense\n"])
def test_sysfs_tells_where_proc_does_not(tmp_path: Path, text: str | None) -> None:
    make_tree(tmp_path, {"/sys/module/nvidia/version": "580.159.04\n"})
    if text is not None:
        make_tree(tmp_path, {"/proc/driver/nvidia/version": text})
    facts = probe_driver(LocalHost(tmp_path))
    assert (facts.loaded, facts.flavour, facts.loaded_build_id) == ("580.159.04", None, None)


@pytest.mark.parametrize("version", ["Deprecated", "", "(null)"])
def test_sysfs_nonsense_is_no_version(tmp_path: Path, version: str) -> None:
    make_tree(tmp_path, {"/sys/module/nvidia/version": version})
    assert probe_driver(LocalHost(tmp_path)).loaded is None


@pytest.mark.parametrize("note", [b"", b"\0" * 11, NOTE[:-1], b"\xff" * 36])
def test_damaged_build_id_note(tmp_path: Path, note: bytes) -> None:
    make_tree(tmp_path, {"/sys/module/nvidia/notes/.note.gnu.build-id": note})
    assert probe_driver(LocalHost(tmp_path)).loaded_build_id is None


def test_closed_library_folder_is_an_error() -> None:
    with public_dir() as root:
        make_tree(root, {f"{LIB}/libnvidia-ml.so.1": "elf"})
        (root / LIB.lstrip("/")).chmod(0o700)
        with as_nobody(), pytest.raises(ProbeError):
            probe_driver(LocalHost(root))
