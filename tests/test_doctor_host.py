"""The doctor on trees: driver, options, device nodes, kernel log, virtualisation, lockdown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuguard.core.doctor_driver import same_value
from gpuguard.core.doctor_facts import ModuleOption
from gpuguard.host import LocalHost
from gpuguard.probes.kernel_log import parse_kernel_log, probe_kernel_log
from gpuguard.probes.modprobe_options import parse_options, probe_options
from gpuguard.probes.params import parse_information, parse_params
from tests import toys
from tests.doctor_kit import FIRST, SECOND, Doctor, machine
from tests.trees import make_tree
from tests.unprivileged import as_nobody, public_dir

PARAMS = "/proc/driver/nvidia/params"
DWORDS = "RMForceStaticBar1=1;PeerMappingOverride=1"
BOOT = "2026-11-29T07:06:40.0+00:00 box kernel: [    0.000000] Linux version 6.8.0-90-generic\n"


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


# Kernel log, CASES C48


THREE_LINES = """\
2026-11-29T07:06:41 box kernel: [    9.1] NVRM: The NVIDIA GPU 0000:41:00.0
2026-11-29T07:06:41 box kernel: [    9.1]                NVRM: (PCI ID: 10de:2b85) installed in this system has
2026-11-29T07:06:41 box kernel: [    9.1]                NVRM: fallen off the bus and is not responding to commands.
2026-11-29T07:06:41 box kernel: [    9.2] nvidia: probe of 0000:41:00.0 failed with error -1
2026-11-29T07:06:41 box kernel: [    9.3] NVRM: The NVIDIA probe routine failed for 1 device(s).
"""  # noqa: E501 - as in the log
XID_79 = (
    "1764400001.250000 box kernel: NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', "
    "name=<unknown>, GPU has fallen off the bus.\n"
    "1764400001.250000 box kernel: NVRM: GPU 0000:41:00.0: GPU has fallen off the bus.\n"
    "1764400002.000000 box kernel: NVRM: The NVIDIA probe routine failed for 1 device(s).\n"
)


@pytest.mark.parametrize("text", [THREE_LINES, XID_79, THREE_LINES * 3, THREE_LINES + XID_79])
def test_a_card_that_has_fallen_off_is_one_fault(tmp_path: Path, text: str) -> None:
    doctor = Doctor(machine(tmp_path, **{"/var/log/kern.log": BOOT + text}))
    found = doctor.only("log")
    assert (found["code"], found["subject"]) == ("card-fallen-off", SECOND)
    assert found["source"] == "/var/log/kern.log"
    assert found["evidence"]["time"].startswith(("2026-11-29T07:06:41", "2025-11-29T07:06:4"))


def test_three_lines_in_one_message() -> None:
    text = (
        "1764400001.2 box kernel: NVRM: The NVIDIA GPU 0000:b3:00.0\\x0aNVRM: (PCI ID: 10de:26b5) "
        "installed in this system has\\x0aNVRM: fallen off the bus and is not responding\n"
    )
    (fault,) = parse_kernel_log(text.splitlines())
    assert (fault.kind, fault.card) == ("fallen-off", "0000:b3:00.0")


def test_the_first_line_alone_is_no_fault() -> None:
    lines = ["NVRM: The NVIDIA GPU 0000:41:00.0 (PCI ID: 10de:2b85)", "NVRM: is not supported"]
    assert parse_kernel_log(lines) == ()


@pytest.mark.parametrize(
    ("line", "kind", "card", "xid"),
    [
        ("NVRM: Xid (PCI:0000:06:00): 79.", "fallen-off", "0000:06:00.0", None),
        ("NVRM: Xid (0000:06:00): 31, Ch 0000001b", "xid", "0000:06:00.0", 31),
        ("NVRM: Xid (PCI:0000:06:00): 119, pid=1, Timeout of RPC", "xid", "0000:06:00.0", 119),
        (
            "AMD-Vi: Event logged [IO_PAGE_FAULT device=01:00.0 domain=0x0015 address=0x1]",
            "page-fault", "0000:01:00.0", None,
        ),
        (
            "nvidia 0000:c1:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0013 address=0x1]",
            "page-fault", "0000:c1:00.0", None,
        ),
        (
            "DMAR: [DMA Write NO_PASID] Request device [01:00.0] fault addr 0xfe000000",
            "page-fault", "0000:01:00.0", None,
        ),
        ("NVRM: GPU 0000:01:00.0 is already bound to NovaCore.", "bound", "0000:01:00.0", None),
        (
            "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x62:0x55:2477)",
            "init-failed", "0000:01:00.0", None,
        ),
        ("NVRM: No NVIDIA devices probed.", "init-failed", "", None),
    ],
)  # fmt: skip
def test_lines_that_name_a_card(line: str, kind: str, card: str, xid: int | None) -> None:
    (fault,) = parse_kernel_log([f"1764400001.5 box kernel: {line}"])
    assert (fault.kind, fault.card, fault.xid) == (kind, card, xid)
    assert fault.time == "2025-11-29T07:06:41Z"


def test_lines_that_name_none() -> None:
    lines = [
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04",
        "nvidia-nvlink: Nvlink Core is being initialized, major device number 511",
        "[drm] Initialized nvidia-drm 0.0.0 for 0000:01:00.0 on minor 1",
        "EXT4-fs (sda1): mounted; Xid is not in here",
    ]
    assert parse_kernel_log(lines) == ()


def test_only_the_newest_boot_counts(tmp_path: Path) -> None:
    machine(tmp_path, **{"/var/log/kern.log": BOOT + THREE_LINES + BOOT})
    assert Doctor(tmp_path).state("log") == "ok"


def test_faults_of_programs_are_notes(tmp_path: Path) -> None:
    line = "1764400001.5 box kernel: NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=python3\n"
    check = Doctor(machine(tmp_path, **{"/var/log/kern.log": BOOT + line * 2})).check("log")
    assert check["state"] == "ok"
    assert check["notes"] == [
        f"{FIRST}: Xid 31, a fault of a program, 2 times, last 2025-11-29T07:06:41Z"
    ]


def test_an_xid_of_the_card(tmp_path: Path) -> None:
    line = "1764400001.5 box kernel: NVRM: Xid (PCI:0000:01:00): 119, pid=7, Timeout\n"
    doctor = Doctor(machine(tmp_path, **{"/var/log/kern.log": BOOT + line}))
    assert doctor.found("log") == [("card-xid", FIRST)]
    assert "Xid 119" in doctor.only("log")["message"]


def test_iommu_faults_of_other_devices_are_not_ours(tmp_path: Path) -> None:
    line = "AMD-Vi: Event logged [IO_PAGE_FAULT device={} domain=0x0015 address=0x1]\n"
    text = BOOT + line.format("05:00.0")
    assert Doctor(machine(tmp_path, **{"/var/log/kern.log": text})).state("log") == "ok"
    text += line.format("01:00.0")
    doctor = Doctor(machine(tmp_path / "new", **{"/var/log/kern.log": text}))
    assert doctor.found("log") == [("iommu-page-fault", FIRST)]


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_log_is_unknown(tmp_path: Path, text: str) -> None:
    assert Doctor(machine(tmp_path, **{"/var/log/kern.log": text})).state("log") == "unknown"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user than oneself")
def test_a_log_that_may_not_be_read_is_unknown() -> None:
    with public_dir() as root:
        machine(root)
        (root / "var/log/kern.log").chmod(0o600)
        with as_nobody():
            assert Doctor(root).state("log") == "unknown"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'Hint: You are currently not seeing messages from other users' >&2", "not seeing"),
        ("echo 'No journal files were opened due to insufficient permissions.'", "insufficient"),
        ("echo '-- No entries --'", "no lines"),
        ("exit 1", "exited with 1"),
        ("echo '[    0.000000] Starting gVisor...'", "gVisor"),
    ],
)
def test_a_journal_that_shows_nothing_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    tools(tmp_path, monkeypatch, journalctl=script, dmesg=script)
    facts = probe_kernel_log(LiveTree(tmp_path / "root"))
    assert facts.source is None
    assert problem in facts.problem


def test_the_journal_is_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(tmp_path, monkeypatch, journalctl=f"cat <<'END'\n{XID_79}END")
    facts = probe_kernel_log(LiveTree(tmp_path / "root"))
    assert facts.source == "journalctl -k -b --no-pager -o short-unix"
    assert [(fault.kind, fault.card) for fault in facts.faults] == [
        ("fallen-off", SECOND), ("init-failed", ""),
    ]  # fmt: skip


class LiveTree(LocalHost):
    """A tree that says it is the running machine."""

    @property
    def is_live(self) -> bool:
        return True

    def path(self, absolute: str, *, follow: bool = True) -> Path:
        return self.root / absolute.lstrip("/")


def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


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
