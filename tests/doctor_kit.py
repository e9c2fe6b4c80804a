"""Trees of a machine with cards, as sysfs and the driver's /proc folder show them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from gpuguard.cli.app import app
from tests.trees import Link, make_tree

Files = Mapping[str, str | bytes | Link | None]

VERSION = "580.159.04"
LOADED = (
    f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {VERSION}  Release Build  (a@b)\n"
)
#: A GeForce: BAR0 16 MiB, BAR1 32 GiB prefetchable, BAR3 32 MiB, an I/O range.
BAR1_32_GIB = """\
0x00000000fb000000 0x00000000fbffffff 0x0000000000040200
0x0000006000000000 0x00000067ffffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000006800000000 0x0000006801ffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x000000000000f000 0x000000000000f07f 0x0000000000040101
0x00000000fc000000 0x00000000fc07ffff 0x0000000000046200
"""
BAR1_256_MIB = BAR1_32_GIB.replace("00000067ffffffff", "000000600fffffff")
SYSFS_LINK = {
    "current_link_speed": "32.0 GT/s PCIe\n",
    "current_link_width": "16\n",
    "max_link_speed": "32.0 GT/s PCIe\n",
    "max_link_width": "16\n",
}
FIRST, SECOND = "0000:01:00.0", "0000:41:00.0"
PORTS = {FIRST: ("pci0000:00", "0000:00:01.0"), SECOND: ("pci0000:40", "0000:40:01.0")}


def config_space(acs: int | None = 0, *, size: int = 4096) -> bytes:
    """A port's configuration space: AER, then ACS with this control register (None: no ACS)."""
    space = bytearray(4096)
    struct.pack_into("<HH", space, 0, 0x1022, 0x1483)
    struct.pack_into("<H", space, 0x06, 0x0010)
    space[0x34] = 0x50
    space[0x50:0x52] = bytes((0x01, 0x58))  # power management
    space[0x58:0x5A] = bytes((0x10, 0x00))  # PCI Express
    second = 0x2A0 if acs is not None else 0
    struct.pack_into("<I", space, 0x100, second << 20 | 2 << 16 | 0x0001)
    if acs is not None:
        struct.pack_into("<IHH", space, 0x2A0, 1 << 16 | 0x000D, 0x005F, acs)
    return bytes(space[:size])


def card(address: str, *, driver: str | None = "nvidia", minor: int = 0) -> Files:
    """One card below a root port of its own."""
    root, port = PORTS[address]
    above = f"/sys/devices/{root}/{port}"
    here = f"{above}/{address}"
    files: dict[str, str | bytes | Link | None] = {
        f"/sys/bus/pci/devices/{address}": Link(here.replace("/sys/", "../../../")),
        f"{above}/config": config_space(),
        f"{here}/vendor": "0x10de\n",
        f"{here}/device": "0x2b85\n",
        f"{here}/class": "0x030000\n",
        f"{here}/resource": BAR1_32_GIB,
        f"{here}/boot_vga": "0\n",
        f"{here}/numa_node": "0\n",
        f"/proc/driver/nvidia/gpus/{address}/information": (
            f"Model: \t\t NVIDIA GeForce RTX 5090\nGPU UUID: \t GPU-{minor}\n"
            f"Device Minor: \t {minor}\nGPU Firmware: \t {VERSION}\nGPU Excluded:\t No\n"
        ),
        f"/dev/nvidia{minor}": "",
    }
    for name, value in SYSFS_LINK.items():
        files[f"{here}/{name}"] = files[f"{above}/{name}"] = value
    if driver is not None:
        files[f"{here}/driver"] = Link(f"../../../../bus/pci/drivers/{driver}")
    return files


def machine(root: Path, *cards: Files, **more: str | bytes) -> Path:
    """Bare metal with the driver loaded and two good cards, unless others are given."""
    for files in cards or (card(FIRST), card(SECOND, minor=1)):
        make_tree(root, files)
    base: dict[str, str | bytes | Link | None] = {
        "/sys/kernel/iommu_groups": None,
        "/sys/kernel/security/lockdown": "[none] integrity confidentiality\n",
        "/sys/class/dmi/id/sys_vendor": "ASRockRack\n",
        "/sys/class/dmi/id/product_name": "ROMED8-2T\n",
        "/sys/module/nvidia/version": VERSION,
        "/sys/module/nvidia_uvm/version": VERSION,
        "/proc/cpuinfo": "vendor_id\t: GenuineIntel\nflags\t\t: fpu sse sse2\n",
        "/proc/cmdline": "BOOT_IMAGE=/vmlinuz ro quiet\n",
        "/proc/stat": "cpu 1 2 3\nbtime 1764400000\n",
        "/proc/driver/nvidia/version": LOADED,
        "/proc/driver/nvidia/params": 'EnableMSI: 1\nDeviceFileMode: 438\nRegistryDwords: ""\n'
        'RegistryDwordsPerDevice: ""\nRmProfilingAdminOnly: 1\n',
        "/dev/nvidiactl": "",
        "/dev/nvidia-uvm": "",
        "/var/log/kern.log": "2025-11-29T07:06:40 box kernel: [    0.000000] Linux version 6.8.0\n",
        "/etc/modprobe.d": None,
    }
    return make_tree(root, {**base, **more})


class Doctor:
    """The program run on a tree."""

    def __init__(self, root: Path) -> None:
        result = CliRunner().invoke(app, ["--root", str(root), "--json", "doctor"])
        assert result.exception is None or isinstance(result.exception, SystemExit), result
        self.status = result.exit_code
        self.document: dict[str, Any] = json.loads(result.output)
        assert doctor_problems(self.document) == []

    def check(self, name: str) -> dict[str, Any]:
        return next(check for check in self.document["checks"] if check["name"] == name)

    def state(self, name: str) -> str:
        return str(self.check(name)["state"])

    def found(self, name: str) -> list[tuple[str, str]]:
        """(code, subject) of each finding of a check."""
        return [(f["code"], f["subject"]) for f in self.check(name)["findings"]]

    def only(self, name: str) -> dict[str, Any]:
        """The only finding of a check."""
        (found,) = self.check(name)["findings"]
        return dict(found)


def doctor_problems(document: object) -> list[str]:
    """What is wrong with an answer by the schema that the package ships."""
    file = resources.files("gpuguard").joinpath("resources/schema/doctor.schema.json")
    validator = Draft202012Validator(json.loads(file.read_text()))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
