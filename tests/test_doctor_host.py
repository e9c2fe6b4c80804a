"""The doctor on trees: driver, options, device nodes, kernel log, virtualisation, lockdown."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuguard.core.doctor_driver import same_value
from gpuguard.core.doctor_facts import ModuleOption
from gpuguard.host import LocalHost
from gpuguard.probes.modprobe_options import parse_options, probe_options
from gpuguard.probes.params import parse_information, parse_params
from tests import toys
from tests.doctor_kit import SECOND, Doctor, machine
from tests.trees import make_tree

PARAMS = "/proc/driver/nvidia/params"
DWORDS = "RMForceStaticBar1=1;PeerMappingOverride=1"


# Driver, flavour, device nodes


def test_nothing_loaded(tmp_path: Path) -> None:
    make_tree(tmp_path, {"/sys/bus/pci/devices": None, "/sys/module/ext4/refcnt": "1\n"})
    doctor = Doctor(tmp_path)
    assert doctor.found("module") == [("driver-not-loaded", "driver")]
    for name in ("flavour", "grant", "options", "nodes"):
        assert doctor.state(name) == "not-applicable"


def test_no_module_trees_are_said_plainly(tmp_path: Path) -> None:
    assert "no /lib/modules" in Doctor(machine(tmp_path)).check("module")["notes"][0]


def test_the_proprietary_flavour(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Nov 4\n"
    doctor = Doctor(machine(tmp_path, **{"/proc/driver/nvidia/version": text}))
    assert doctor.only("flavour")["code"] == "proprietary-driver"
    assert doctor.only("flavour")["source"] == "/proc/driver/nvidia/version"


def test_firmware_of_another_version(tmp_path: Path) -> None:
    path = f"/proc/driver/nvidia/gpus/{SECOND}/information"
    machine(tmp_path, **{path: "Device Minor: \t 1\nGPU Firmware: \t 570.86.15\n"})
    assert ("firmware-mismatch", SECOND) in Doctor(tmp_path).found("module")


def test_information_as_the_driver_writes_it() -> None:
    text = "Model: \t\t NVIDIA H200\nDevice Minor: \t 3\nGPU Firmware: \t N/A\nGPU Excluded:\t No\n"
    found = parse_information(text)
    assert (found.minor, found.firmware, found.excluded) == (3, None, False)
    assert parse_information("").minor is None


def test_missing_device_nodes(tmp_path: Path) -> None:
    machine(tmp_path)
    (tmp_path / "dev/nvidia-uvm").unlink()
    (tmp_path / "dev/nvidia1").unlink()
    found = Doctor(tmp_path).only("nodes")
    assert found["code"] == "device-node-missing"
    assert found["subject"] == "/dev/nvidia1, /dev/nvidia-uvm"
    assert "nvidia-modprobe" in found["remedy"]


def test_in_a_container_the_remedy_is_another(tmp_path: Path) -> None:
    machine(tmp_path, **{"/.dockerenv": ""})
    (tmp_path / "dev/nvidia-uvm").unlink()
    assert "--gpus all" in Doctor(tmp_path).only("nodes")["remedy"]


def test_without_the_uvm_module(tmp_path: Path) -> None:
    machine(tmp_path)
    (tmp_path / "sys/module/nvidia_uvm/version").unlink()
    (tmp_path / "sys/module/nvidia_uvm").rmdir()
    assert Doctor(tmp_path).found("nodes") == [("uvm-not-loaded", "nvidia-uvm")]


# Options


def configured(tmp_path: Path, line: str, live: str = "") -> Doctor:
    machine(
        tmp_path,
        **{
            "/etc/modprobe.d/nvidia.conf": f"# comment\n{line}\n",
            PARAMS: f'EnableMSI: 1\nDeviceFileMode: 438\nRegistryDwords: "{live}"\n',
        },
    )
    return Doctor(tmp_path)


def test_configured_and_not_live(tmp_path: Path) -> None:
    found = configured(tmp_path, f'options nvidia NVreg_RegistryDwords="{DWORDS}"').only("options")
    assert (found["code"], found["subject"]) == ("option-not-live", "NVreg_RegistryDwords")
    assert found["source"] == "/etc/modprobe.d/nvidia.conf"
    assert found["evidence"] == {"live": "", "configured": DWORDS, "live_source": PARAMS}
    assert "update-initramfs" in found["remedy"]


def test_live_and_not_configured(tmp_path: Path) -> None:
    found = configured(tmp_path, "", DWORDS).only("options")
    assert found["code"] == "option-not-configured"
    assert found["remedy"].startswith(f'options nvidia NVreg_RegistryDwords="{DWORDS}"')


@pytest.mark.parametrize(
    "module", ["nvidia", "nvidia-current", "nvidia_current", "nvidia-current-open"]
)
def test_configured_and_live(tmp_path: Path, module: str) -> None:
    doctor = configured(tmp_path, f'options {module} NVreg_RegistryDwords="{DWORDS}"', DWORDS)
    assert doctor.state("options") == "ok"
    assert doctor.check("options")["summary"] == "1 configured, all live"


def test_an_option_that_the_driver_does_not_list_is_a_note(tmp_path: Path) -> None:
    check = configured(tmp_path, "options nvidia NVreg_Frobnicate=1").check("options")
    assert check["state"] == "ok"
    assert "NVreg" not in check["summary"]
    assert check["notes"][0].startswith("Frobnicate (in /etc/modprobe.d/nvidia.conf)")


@pytest.mark.parametrize(
    ("name", "one", "other", "same"),
    [
        ("DeviceFileMode", "0666", "438", True),
        ("EnableMSI", "0x1", "1", True),
        ("EnableMSI", "0", "1", False),
        ("UsePageAttributeTable", "-1", "4294967295", True),
        ("RegistryDwords", "a=1; B=0x10;", "A=1;b=16", True),
        ("RegistryDwords", "a=1", "a=1;b=2", False),
        ("TemporaryFilePath", "/tmp", "/tmp", True),
        ("TemporaryFilePath", "/tmp", "", False),
    ],
)
def test_values_compare_as_the_kernel_reads_them(
    name: str, one: str, other: str, same: bool
) -> None:
    assert same_value(name, one, other) is same


def test_names_and_values_of_a_real_driver() -> None:
    text = (Path(__file__).parent / "golden/nvidia-580-params.txt").read_text()
    found = parse_params(text)
    assert len(found) == len(text.splitlines())
    assert found["DeviceFileMode"] == "438"
    assert found["RegistryDwords"] == found["CoherentGPUMemoryMode"] == ""
    assert parse_params('RegistryDwords: "a=1;b=2"\n') == {"RegistryDwords": "a=1;b=2"}


def test_grammar_of_modprobe_d() -> None:
    text = (
        "options nvidia NVreg_A=1 \\\n  NVreg_B=2 # no more\n#options nvidia NVreg_C=3\n"
        "options nvidia-drm modeset=1\noptions nvidia_uvm NVreg_D=4\nalias nvidia nvidia-current\n"
        'options nvidia NVreg_E="x y"\noptions nvidia NVreg_F="open\n'
    )
    found = [(option.name, option.value) for option in parse_options(text, "f")]
    assert found == [("A", "1"), ("B", "2"), ("E", "x y"), ("F", '"open')]


def test_an_earlier_folder_hides_a_file_of_the_same_name(tmp_path: Path) -> None:
    make_tree(
        tmp_path,
        {
            "/etc/modprobe.d/nvidia.conf": "options nvidia NVreg_A=1\n",
            "/usr/lib/modprobe.d/nvidia.conf": "options nvidia NVreg_A=2\n",
            "/usr/lib/modprobe.d/nvidia.conf.bak": "options nvidia NVreg_A=3\n",
            "/proc/cmdline": "ro nvidia.NVreg_B=5 nvidia-drm.modeset=1 quiet\n",
        },
    )
    assert probe_options(LocalHost(tmp_path)) == (
        ModuleOption("A", "1", "/etc/modprobe.d/nvidia.conf"),
        ModuleOption("B", "5", "/proc/cmdline"),
    )


# Machine


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({}, "ok"),
        ({"/proc/cpuinfo": "flags\t\t: fpu hypervisor\n"}, "problem"),
        (
            {
                "/proc/cpuinfo": "",
                "/sys/class/dmi/id/sys_vendor": "QEMU\n",
                "/sys/class/dmi/id/product_name": "Standard PC (Q35 + ICH9, 2009)\n",
            },
            "problem",
        ),
        (
            {
                "/proc/cpuinfo": "",
                "/sys/class/dmi/id/sys_vendor": "",
                "/sys/class/dmi/id/product_name": "",
            },
            "unknown",
        ),
    ],
)
def test_virtual_machines(tmp_path: Path, files: dict[str, str], state: str) -> None:
    doctor = Doctor(machine(tmp_path, **files))
    assert doctor.state("virt") == state
    if state == "problem":
        assert "verify --deep" in doctor.only("virt")["remedy"]


def test_lockdown_is_told(tmp_path: Path) -> None:
    path = "/sys/kernel/security/lockdown"
    machine(tmp_path, **{path: "none [integrity] confidentiality\n"})
    assert "integrity" in Doctor(tmp_path).check("secure-boot")["notes"][0]
    machine(tmp_path / "new", **{path: "nonsense\n"})
    assert Doctor(tmp_path / "new").state("secure-boot") == "unknown"


def test_it_changes_nothing_but_its_own_cache_and_lock(tmp_path: Path) -> None:
    machine(tmp_path)
    before = snapshot(tmp_path)
    Doctor(tmp_path)
    assert snapshot(tmp_path) == before


def snapshot(root: Path) -> dict[str, str]:
    found = toys.snapshot(root, without=("var/cache/gpuguard", "run"))
    return {path: what for path, what in found.items() if path != "var/cache"}
