"""What the kernel's log says about the cards: CASES C48, C03."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuguard.host import LocalHost
from gpuguard.probes.kernel_log import parse_kernel_log, probe_kernel_log
from tests.doctor_kit import FIRST, SECOND, Doctor, machine
from tests.unprivileged import as_nobody, public_dir

BOOT = "2026-11-29T07:06:40.0+00:00 box kernel: [    0.000000] Linux version 6.8.0-90-generic\n"
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
