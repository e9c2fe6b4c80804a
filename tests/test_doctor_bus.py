"""The doctor on trees: cards, IOMMU, ACS, BAR1, link, display (CASES A, C03, C06, C09)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuguard.errors import ProbeError
from gpuguard.probes.acs import parse_acs
from gpuguard.probes.pci import parse_bar1, parse_link, parse_resize
from tests.doctor_kit import (
    BAR1_32_GIB,
    BAR1_256_MIB,
    FIRST,
    SECOND,
    Doctor,
    card,
    config_space,
    machine,
)
from tests.trees import Link, make_tree
from tests.unprivileged import as_nobody, public_dir

PORT = "/sys/devices/pci0000:00/0000:00:01.0"
HERE = f"{PORT}/{FIRST}"
ONE_BAR = BAR1_32_GIB.splitlines()[0] + "\n"


# Who drives the cards, CASES C09


@pytest.mark.parametrize(
    ("driver", "code", "remedy"),
    [
        (
            "nova_core",
            "card-foreign-driver",
            "blacklist nova; blacklist nova_core; blacklist nova_drm",
        ),
        ("nouveau", "card-foreign-driver", "blacklist nouveau"),
        ("vfio-pci", "card-vfio", "p2p.exclude"),
        ("nvidiafb", "card-foreign-driver", "blacklist nvidiafb"),
        (None, "card-unbound", "modprobe nvidia"),
    ],
)
def test_a_card_that_another_driver_has(
    tmp_path: Path, driver: str | None, code: str, remedy: str
) -> None:
    doctor = Doctor(machine(tmp_path, card(FIRST, driver=driver), card(SECOND, minor=1)))
    found = doctor.only("cards")
    assert (found["code"], found["subject"], found["severity"]) == (code, FIRST, "critical")
    assert remedy in found["remedy"]
    assert found["source"] == f"/sys/bus/pci/devices/{FIRST}/driver"
    assert doctor.status == 1


def test_a_card_for_guests_is_fine_if_the_configuration_says_so(tmp_path: Path) -> None:
    machine(tmp_path, card(FIRST, driver="vfio-pci"), card(SECOND, minor=1))
    config = f"source: {{path: /opt/source}}\np2p: {{exclude: ['{FIRST}']}}\n"
    make_tree(tmp_path, {"/etc/gpuguard/gpuguard.yaml": config})
    check = Doctor(tmp_path).check("cards")
    assert check["state"] == "ok"
    assert f"{FIRST} is left out by p2p.exclude" in check["notes"]


def test_no_card_at_all(tmp_path: Path) -> None:
    make_tree(tmp_path, {"/sys/bus/pci/devices": None})
    doctor = Doctor(tmp_path)
    assert doctor.found("cards") == [("no-cards", "cards")]
    assert doctor.status == 1


def test_a_card_that_the_driver_leaves_out(tmp_path: Path) -> None:
    path = f"/proc/driver/nvidia/gpus/{FIRST}/information"
    machine(tmp_path, **{path: "Device Minor: \t 0\nGPU Excluded:\t Yes\n"})
    assert Doctor(tmp_path).found("cards") == [("card-excluded", FIRST)]


def test_a_tree_without_sys_is_unknown_and_says_why(tmp_path: Path) -> None:
    doctor = Doctor(make_tree(tmp_path, {"/etc/hostname": "disk\n"}))
    assert doctor.status == 3
    assert doctor.document["verdict"] == "unknown"
    assert "a disk at rest" in doctor.only("cards")["message"]
    assert doctor.state("acs") == "not-applicable"


# IOMMU, CASES C03


def in_group(kind: str) -> dict[str, str | bytes]:
    group = "/sys/kernel/iommu_groups/15"
    return {f"{group}/type": f"{kind}\n", f"{group}/devices/{FIRST}": ""}


@pytest.mark.parametrize("kind", ["DMA", "DMA-FQ"])
def test_a_translating_group(tmp_path: Path, kind: str) -> None:
    doctor = Doctor(machine(tmp_path, **in_group(kind)))
    found = doctor.only("iommu")
    assert (found["code"], found["subject"], found["severity"]) == (
        "iommu-translating", FIRST, "critical",
    )  # fmt: skip
    assert found["evidence"] == {"group": "15", "type": kind}
    assert found["source"] == "/sys/kernel/iommu_groups/15/type"
    assert "iommu=pt" in found["remedy"]


@pytest.mark.parametrize("cmdline", ["ro quiet", "ro iommu=pt", "ro amd_iommu=off"])
def test_the_command_line_decides_nothing(tmp_path: Path, cmdline: str) -> None:
    machine(tmp_path / "bad", **in_group("DMA"), **{"/proc/cmdline": cmdline})
    machine(tmp_path / "good", **in_group("identity"), **{"/proc/cmdline": cmdline})
    assert Doctor(tmp_path / "bad").state("iommu") == "problem"
    assert Doctor(tmp_path / "good").state("iommu") == "ok"


def test_no_groups_is_fine(tmp_path: Path) -> None:
    assert Doctor(machine(tmp_path)).check("iommu")["summary"] == "no IOMMU groups: it is off"


def test_a_group_type_that_is_not_known(tmp_path: Path) -> None:
    doctor = Doctor(machine(tmp_path, **in_group("blocked")))
    assert doctor.found("iommu") == [("iommu-foreign-domain", FIRST)]
    doctor = Doctor(machine(tmp_path / "new", **in_group("quantum")))
    assert doctor.found("iommu") == [("iommu-unknown", FIRST)]
    assert doctor.state("iommu") == "unknown"


def test_a_group_without_a_type_is_unknown(tmp_path: Path) -> None:
    machine(tmp_path, **{f"/sys/kernel/iommu_groups/15/devices/{FIRST}": ""})
    assert Doctor(tmp_path).state("iommu") == "unknown"


# ACS, CASES C06


def test_redirect_on_a_port_above_a_card(tmp_path: Path) -> None:
    doctor = Doctor(machine(tmp_path, **{f"{PORT}/config": config_space(0x001D)}))
    found = doctor.only("acs")
    assert (found["code"], found["subject"]) == ("acs-redirect", "0000:00:01.0")
    assert found["evidence"]["cards"] == FIRST
    assert found["evidence"]["ACSCtl"] == (
        "0x001d SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-"
    )
    assert found["remedy"].startswith("setpci -s 0000:00:01.0 ECAP_ACS+0x6.w=0000:003c; after ")


def test_source_validation_alone_is_no_fault(tmp_path: Path) -> None:
    machine(tmp_path, **{f"{PORT}/config": config_space(0x0001)})
    assert Doctor(tmp_path).state("acs") == "ok"


def test_upstream_forwarding_alone_is_a_note(tmp_path: Path) -> None:
    check = Doctor(machine(tmp_path, **{f"{PORT}/config": config_space(0x0011)})).check("acs")
    assert check["state"] == "ok"
    assert "UpstreamFwd" in check["notes"][0]


def test_a_port_that_is_above_no_card_does_not_matter(tmp_path: Path) -> None:
    other = "/sys/devices/pci0000:00/0000:00:03.0"
    machine(tmp_path, **{f"{other}/config": config_space(0x001D)})
    assert Doctor(tmp_path).state("acs") == "ok"


def test_64_bytes_are_unknown_and_not_clean(tmp_path: Path) -> None:
    doctor = Doctor(machine(tmp_path, **{f"{PORT}/config": config_space(0x001D, size=64)}))
    found = doctor.only("acs")
    assert (found["code"], found["severity"]) == ("acs-unknown", "unknown")
    assert "only 64 bytes" in found["message"]
    assert "root" in found["remedy"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user than oneself")
def test_an_ordinary_user_gets_unknown(tmp_path: Path) -> None:
    with public_dir() as root:
        machine(root)
        (root / PORT.lstrip("/") / "config").chmod(0o600)
        with as_nobody():
            doctor = Doctor(root)
        assert doctor.state("acs") == "unknown"
        assert Doctor(root).state("acs") == "ok"


@pytest.mark.parametrize("control", [0x00, 0x01, 0x1D, 0x5F])
def test_control_register(control: int) -> None:
    assert parse_acs(config_space(control)) == control


def test_no_acs_and_conventional_pci() -> None:
    assert parse_acs(config_space(None)) is None
    plain = bytearray(config_space(None, size=256))
    plain[0x34] = 0
    assert parse_acs(bytes(plain)) is None


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (b"", "only 0 bytes"),
        (config_space(size=64), "only 64 bytes"),
        (config_space(size=256), "MMCONFIG"),
        (b"\xff" * 4096, "does not answer"),
        (config_space(size=0x2A4), "ends at"),
    ],
)
def test_what_cannot_be_told(config: bytes, problem: str) -> None:
    with pytest.raises(ProbeError, match=problem):
        parse_acs(config)


@pytest.mark.parametrize(
    ("following", "problem"), [(0x100, "loop"), (0x103, "damaged"), (4, "damaged")]
)
def test_a_damaged_list(following: int, problem: str) -> None:
    config = bytearray(config_space(None))
    config[0x100:0x104] = (following << 20 | 1 << 16 | 0x0001).to_bytes(4, "little")
    with pytest.raises(ProbeError, match=problem):
        parse_acs(bytes(config))


@pytest.mark.skipif(shutil.which("lspci") is None, reason="apt-get install pciutils")
@pytest.mark.parametrize("control", [0x00, 0x1D, 0x41])
def test_lspci_reads_the_same(tmp_path: Path, control: int) -> None:
    space = config_space(control)
    rows = (f"{at:02x}: {space[at : at + 16].hex(' ')}\n" for at in range(0, 4096, 16))
    dump = tmp_path / "dump"
    dump.write_text("00:01.0 PCI bridge: port\n" + "".join(rows))
    text = subprocess.run(
        ["lspci", "-F", dump, "-vvv"], capture_output=True, text=True, check=True
    ).stdout
    assert f"ReqRedir{'+' if control & 4 else '-'} CmpltRedir{'+' if control & 8 else '-'}" in text


# BAR1


def test_bar1_of_a_quarter_gigabyte(tmp_path: Path) -> None:
    machine(
        tmp_path,
        **{f"{HERE}/resource": BAR1_256_MIB, f"{HERE}/resource1_resize": "000000000000ff00\n"},
    )
    found = [f for f in Doctor(tmp_path).check("bar1")["findings"] if f["subject"] == FIRST]
    assert [f["code"] for f in found] == ["bar1-small"]
    assert found[0]["evidence"]["bar1_bytes"] == str(256 << 20)
    assert "Resizable BAR" in found[0]["remedy"]
    assert "the card offers 32768 MiB" in found[0]["remedy"]


def test_bar1_without_nvml_is_unknown(tmp_path: Path) -> None:
    assert Doctor(machine(tmp_path)).state("bar1") == "unknown"


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        (BAR1_32_GIB, (1, 32 << 30)),
        (BAR1_256_MIB, (1, 256 << 20)),
        # H200: BAR0 is a 64-bit BAR, so that BAR1 lies in line 2
        (
            "0x0000104002000000 0x0000104002ffffff 0x000000000014220c\n" + "0x0 0x0 0x0\n"
            "0x0000100000000000 0x0000103fffffffff 0x000000000014220c\n" + "0x0 0x0 0x0\n"
            "0x0000104000000000 0x0000104001ffffff 0x000000000014220c\n",
            (2, 256 << 30),
        ),
        # sized, and no room found
        (f"{ONE_BAR}0x0000000000000000 0x00000007ffffffff 0x000000002014220c\n", (1, 0)),
        (ONE_BAR, (1, 0)),
        ("", (1, 0)),
    ],
)
def test_where_bar1_is(resource: str, expected: tuple[int, int]) -> None:
    assert parse_bar1(resource) == expected


def test_bar1_without_an_address(tmp_path: Path) -> None:
    machine(tmp_path, **{f"{HERE}/resource": ONE_BAR})
    assert ("bar1-unassigned", FIRST) in Doctor(tmp_path).found("bar1")


@pytest.mark.parametrize(
    ("text", "size"), [("000000000000ffc0\n", 32 << 30), ("0\n", None), ("", None)]
)
def test_sizes_on_offer(text: str, size: int | None) -> None:
    assert parse_resize(text) == size


# Link and display


def test_a_narrow_link_of_a_wide_port(tmp_path: Path) -> None:
    doctor = Doctor(machine(tmp_path, **{f"{HERE}/current_link_width": "8\n"}))
    found = doctor.only("link")
    assert (found["code"], found["subject"]) == ("link-width", FIRST)
    assert "seat the card" in found["remedy"]


def test_a_narrow_link_of_a_narrow_slot(tmp_path: Path) -> None:
    machine(tmp_path, **{f"{HERE}/current_link_width": "8\n", f"{PORT}/max_link_width": "8\n"})
    found = Doctor(tmp_path).only("link")
    assert "the port above (0000:00:01.0) has no more lanes" in found["message"]
    assert "another slot" in found["remedy"]


def test_an_idle_card_may_be_slow(tmp_path: Path) -> None:
    machine(tmp_path, **{f"{HERE}/current_link_speed": "2.5 GT/s PCIe\n"})
    check = Doctor(tmp_path).check("link")
    assert check["state"] == "ok"
    assert check["notes"] == [f"{FIRST} runs at 2.5 of 32 GT/s; idle cards slow down"]


@pytest.mark.parametrize("width", ["0", "63", "255", "Unknown", ""])
def test_a_width_that_is_not_told(tmp_path: Path, width: str) -> None:
    machine(tmp_path, **{f"{HERE}/current_link_width": f"{width}\n"})
    assert Doctor(tmp_path).state("link") == "unknown"


def test_links_as_sysfs_writes_them() -> None:
    link = parse_link("8.0 GT/s PCIe", "16", "Unknown", "255")
    assert (link.speed, link.width, link.max_speed, link.max_width) == (8.0, 16, None, None)


def test_a_card_with_a_screen(tmp_path: Path) -> None:
    machine(tmp_path, **{f"{HERE}/drm/card1/card1-HDMI-A-1/status": "connected\n"})
    found = Doctor(tmp_path).only("display")
    assert (found["code"], found["subject"], found["severity"]) == (
        "display-card",
        FIRST,
        "warning",
    )
    assert found["evidence"]["connected"] == "card1-HDMI-A-1"


def test_the_boot_display_without_nvml(tmp_path: Path) -> None:
    assert Doctor(machine(tmp_path, **{f"{HERE}/boot_vga": "1\n"})).found("display") == [
        ("display-card", FIRST)
    ]


def test_a_link_that_leaves_the_root_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    make_tree(outside, {"0000:09:00.0/vendor": "0x10de\n", "0000:09:00.0/class": "0x030000\n"})
    root = make_tree(
        tmp_path / "root", {"/sys/bus/pci/devices/0000:09:00.0": Link(f"{outside}/0000:09:00.0")}
    )
    assert Doctor(root).found("cards") == [("no-cards", "cards")]
