"""``gpuguard verify``, the whole program: sources, expectations, verdicts (CASES A, E)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.p2pbox import P2pBox, bus_id, gpu_list, matrix, simulated_host, uuid
from tests.trees import make_tree

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def box(tmp_path: Path) -> P2pBox:
    """Four cards, everything OK by both sources."""
    return P2pBox(tmp_path / "host").nvml().smi()


# --- both sources ---------------------------------------------------------------------------


def test_both_agree(box: P2pBox) -> None:
    status, document = box.verify()
    assert (status, document["verdict"]) == (0, "ok")
    assert document["p2p"]["source"] == "nvml"
    assert document["p2p"]["sources"] == ["nvml", "nvidia-smi"]
    assert len(document["p2p"]["pairs"]) == 12
    assert [gpu["pci_bus_id"] for gpu in document["p2p"]["gpus"]] == [
        bus_id(n) for n in (1, 2, 3, 4)
    ]
    assert document["expectation"] | {"cards": []} == {
        "source": "pci-bus", "gpus": 4, "pairs": 12, "cards": [], "groups": [], "exclude": [],
        "missing": [], "accepted": None,
    }  # fmt: skip


def test_nvml_alone_will_do(box: P2pBox) -> None:
    (box.root / "usr/bin/nvidia-smi").unlink()
    status, document = box.verify()
    assert (status, document["p2p"]["sources"]) == (0, ["nvml"])
    assert document["sources"][1]["reason"] == "tool-missing"


def test_nvidia_smi_alone_will_do(box: P2pBox) -> None:
    box.without_nvml()
    status, document = box.verify()
    assert (status, document["p2p"]["sources"]) == (0, ["nvidia-smi"])
    assert document["p2p"]["source"] == "nvidia-smi"
    assert document["sources"][0]["reason"] == "binding-missing"
    assert document["p2p"]["gpus"][3]["pci_bus_id"] == bus_id(4)


def test_one_pair_on_which_they_differ(box: P2pBox) -> None:
    box.smi(read=matrix(4, c0_1="CNS"), write=matrix(4))
    status, document = box.verify()
    assert (status, document["p2p"]["healthy"]) == (1, False)
    finding = {f["code"]: f for f in document["findings"]}["p2p-sources-disagree"]
    assert finding["evidence"] == {
        f"{uuid(1)} -> {uuid(2)}": "nvml read OK write OK, nvidia-smi read CNS write OK"
    }
    worse = next(p for p in document["p2p"]["pairs"] if p["read"] != "OK")
    assert (worse["src"], worse["dst"], worse["read"]) == (uuid(1), uuid(2), "CNS")


def test_a_card_that_only_one_of_them_sees(box: P2pBox) -> None:
    box.smi(read=matrix(3), listed=gpu_list([1, 2, 3]))
    status, document = box.verify()
    assert status == 1
    finding = {f["code"]: f for f in document["findings"]}["p2p-sources-disagree"]
    assert finding["evidence"][uuid(4)] == "nvml sees it, nvidia-smi does not"


# --- what the driver says -------------------------------------------------------------------


def test_eight_cards_all_chipset_not_supported(tmp_path: Path) -> None:  # CASES C07
    box = P2pBox(tmp_path, 8).nvml(all=1).smi(read=matrix(8, "CNS"))
    status, document = box.verify()
    (finding,) = document["findings"]
    assert (status, finding["code"]) == (1, "p2p-lost")
    assert "56 of 56" in finding["message"]
    assert "chipset not supported" in finding["message"]
    assert re.search("loaded module.*then.*platform", finding["remedy"])
    assert "rebuild" not in finding["remedy"]


@pytest.mark.parametrize("token", ["GNS", "TNS", "NS", "DR", "U", "XYZ", "ERR!"])
def test_every_word_of_nvidia_smi_but_ok_is_bad(box: P2pBox, token: str) -> None:  # CASES C10
    box.without_nvml().smi(read=matrix(4, c2_3=token))
    status, document = box.verify()
    bad = [pair for pair in document["p2p"]["pairs"] if pair["read"] != "OK"]
    assert (status, [(p["read"], p["write"]) for p in bad]) == (1, [(token, token)])
    assert token in document["findings"][0]["message"]


def test_one_direction_of_one_access_is_enough(box: P2pBox) -> None:  # CASES C11
    box.nvml({"0 1 1": 1}).smi(read=matrix(4), write=matrix(4, c0_1="CNS"))
    status, document = box.verify()
    (finding,) = document["findings"]
    assert (status, finding["code"]) == (1, "p2p-lost")
    assert finding["message"].startswith("1 of 12 ")
    assert finding["evidence"][f"{bus_id(1)} -> {bus_id(2)}"] == "read OK, write CNS"


@pytest.mark.parametrize(
    ("said", "words"),
    [("NotSupported", "NVMLError_NotSupported"), ("GpuIsLost", "GpuIsLost"), (9, "status 9"),
     (-1, "status -1")],
)  # fmt: skip
def test_nvml_fails_on_one_pair(box: P2pBox, said: Any, words: str) -> None:  # CASES C51
    box.nvml({"1 0 0": said})
    (box.root / "usr/bin/nvidia-smi").unlink()
    status, document = box.verify()
    assert status == 1
    assert [p["read"] for p in document["p2p"]["pairs"]].count("U") == 1
    assert words in document["sources"][0]["problem"]


def test_nvml_that_gives_bytes(box: P2pBox) -> None:
    box.nvml(bytes=True)
    assert box.verify()[0] == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("LibraryNotFound", "library-missing"), ("DriverNotLoaded", "no-driver"),
        ("LibRmVersionMismatch", "version-mismatch"), ("Uninitialized", "failed"),
    ],
)  # fmt: skip
def test_nvml_that_does_not_start(box: P2pBox, error: str, reason: str) -> None:
    status, document = box.nvml(init=error).verify()
    assert (status, document["p2p"]["sources"]) == (0, ["nvidia-smi"])
    assert document["sources"][0]["reason"] == reason
    assert error in document["sources"][0]["problem"]


def test_nvml_that_fails_after_it_has_started(box: P2pBox) -> None:
    status, document = box.nvml(count_error="Unknown").verify()
    assert (status, document["p2p"]["sources"]) == (0, ["nvidia-smi"])
    assert (box.root / "nvml.log").read_text() == "shutdown\n"


@pytest.mark.parametrize(
    "code", ["def nvmlInit(): pass", "1 +", "import os; os._exit(3)", "print('{}')", "x = 1"]
)
def test_a_binding_of_another_kind(box: P2pBox, code: str) -> None:
    status, document = box.without_nvml(code).verify()
    assert (status, document["p2p"]["sources"]) == (0, ["nvidia-smi"])
    assert document["sources"][0]["reason"] == "failed"


def test_sixteen_cards(tmp_path: Path) -> None:
    box = (
        P2pBox(tmp_path, 16).nvml({"1 10 0": 1}).smi(read=matrix(16, c1_10="CNS"), write=matrix(16))
    )
    status, document = box.verify()
    (finding,) = document["findings"]
    assert (status, finding["message"][:9]) == (1, "1 of 240 ")
    assert f"{bus_id(2)} -> {bus_id(11)}" in finding["evidence"]


MIG = "  MIG 3g.40gb     Device  0: (UUID: MIG-00000000-0000-4000-8000-000000000001)\n"


@pytest.mark.parametrize(
    "form",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\t\n", "\n").replace("\t", "    "),
        lambda text: "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n" + text,
        lambda text: text.replace("\n", f"\n{MIG}", 1) if text.startswith("GPU 0") else text,
        lambda text: f"\x1b[1m{text}\x1b[0m" if "Legend" in text else text,
    ],
    ids=["crlf", "blanks", "warning", "mig", "escapes"],
)
def test_other_forms_of_the_same_text(box: P2pBox, form: Any) -> None:
    box.without_nvml().smi(read=form(matrix(4)), listed=form(gpu_list([1, 2, 3, 4])))
    assert box.verify()[0] == 0


def test_the_capture_of_two_real_cards(tmp_path: Path) -> None:
    read = (GOLDEN / "nvidia-smi-580-topo-p2p-r.txt").read_text()
    box = P2pBox(tmp_path, 2).nvml().smi(read=read)
    assert box.verify()[0] == 0


@pytest.mark.parametrize(
    "read",
    [matrix(4).replace("GPU3\tOK\tOK\tOK\tX\t\n", ""), matrix(5), matrix(4).replace("X", "OK"), ""],
    ids=["row missing", "too many", "no diagonal", "empty"],
)
def test_what_is_no_square_is_no_answer(box: P2pBox, read: str) -> None:
    status, document = box.without_nvml().smi(read=read).verify()
    assert (status, document["p2p"]["source"]) == (3, None)


# --- nobody can tell ------------------------------------------------------------------------

HANDLE = "Unable to determine the device handle for GPU0000:04:00.0: Unknown Error"


@pytest.mark.parametrize(
    ("script", "reason", "remedy"),
    [
        ("echo NVIDIA-SMI has failed because; exit 9", "no-driver", "modprobe nvidia"),
        ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18",
         "version-mismatch", "reboot into a kernel that is ready"),
        ("exit 127", "tool-missing", "install nvidia-smi"),
        ("exit 0", "empty-output", "first in PATH"),
        ("echo bad; exit 3", "failed", "by itself"),
    ],
)  # fmt: skip
def test_states_in_which_nobody_can_look(
    box: P2pBox, script: str, reason: str, remedy: str
) -> None:  # CASES C45
    status, document = box.without_nvml().smi_script(script).verify()
    (finding,) = document["findings"]
    assert (status, finding["code"]) == (3, "p2p-unknown")
    assert document["sources"][1]["reason"] == reason
    if reason != "tool-missing":
        assert finding["evidence"]["reason"] == reason
        assert remedy in finding["remedy"]


@pytest.mark.parametrize("status", [0, 6])
def test_the_driver_has_no_card(box: P2pBox, status: int) -> None:
    box.without_nvml().smi_script(f"echo No devices were found; exit {status}")
    exit_status, document = box.verify()
    (finding,) = document["findings"]
    assert (exit_status, finding["code"], finding["subject"]) == (1, "card-missing", "4 cards")
    assert document["sources"][1]["reason"] == "no-devices"
    assert document["p2p"]["healthy"] is False


def test_no_card_anywhere(tmp_path: Path) -> None:
    box = P2pBox(tmp_path, 0).nvml().smi_script("echo No devices were found")
    status, document = box.verify()
    assert (status, document["findings"][0]["code"]) == (3, "p2p-unknown")
    assert document["expectation"]["source"] == "none"


def test_no_driver_is_loaded(box: P2pBox) -> None:
    (box.root / "proc/driver/nvidia/version").unlink()
    status, document = box.verify()
    assert status == 3
    assert {source["reason"] for source in document["sources"]} == {"no-driver"}


# --- cards ----------------------------------------------------------------------------------


def test_a_card_without_handle_is_named(tmp_path: Path) -> None:  # CASES C46
    box = P2pBox(tmp_path, 4, seen=[1, 2, 3]).without_nvml()
    listed = f"{HANDLE}\n{gpu_list([1, 2, 3])}"
    status, document = box.smi(read=f"{HANDLE}\n{matrix(3)}", listed=listed).verify()
    (finding,) = document["findings"]
    assert (status, finding["code"], finding["subject"]) == (1, "card-missing", bus_id(4))
    assert finding["evidence"] == {bus_id(4): "Unknown Error"}
    assert document["p2p"]["healthy"] is False
    assert len(document["p2p"]["pairs"]) == 6


def test_a_card_without_handle_and_nothing_else(box: P2pBox) -> None:
    box.without_nvml().smi_script(f"echo '{HANDLE}'; exit 255")
    status, document = box.verify()
    assert status == 1
    found = {f["code"]: f for f in document["findings"]}
    assert found["card-unreachable"]["subject"] == bus_id(4)
    assert document["sources"][1]["reason"] == "card-unreachable"


def test_a_card_that_nvml_has_lost(tmp_path: Path) -> None:
    box = P2pBox(tmp_path, 4).nvml(lost={1: "GpuIsLost"})
    status, document = box.verify()
    (finding,) = document["findings"]
    assert (status, finding["subject"]) == (1, bus_id(2))
    assert "GpuIsLost" in finding["evidence"]["GPU 1"]


@pytest.mark.parametrize(
    ("driver", "words"),
    [("nova_core", "keep nova_core away"), ("nouveau", "keep nouveau away"),
     ("vfio-pci", "p2p.exclude"), (None, "dmesg")],
)  # fmt: skip
def test_a_card_that_another_driver_holds(tmp_path: Path, driver: str | None, words: str) -> None:
    box = P2pBox(tmp_path, 4, seen=[2, 3, 4]).nvml().smi()  # CASES C09
    box.bind(1, driver)
    status, document = box.verify()
    (finding,) = document["findings"]
    assert (status, finding["code"], finding["subject"]) == (1, "card-missing", bus_id(1))
    assert (driver or "no driver") in finding["evidence"][bus_id(1)]
    assert words in finding["remedy"]


def test_a_card_for_a_virtual_machine(tmp_path: Path) -> None:
    box = P2pBox(tmp_path, 4, seen=[2, 3, 4]).nvml().smi()
    box.bind(1, "vfio-pci")
    box.configure(exclude=["01:00.0"])
    status, document = box.verify()
    assert (status, document["verdict"]) == (0, "ok")
    assert document["expectation"]["gpus"] == 3
    assert document["pci"][0] == {
        "pci_bus_id": bus_id(1), "driver": "vfio-pci", "seen": False, "excluded": True,
    }  # fmt: skip


def test_a_guest_is_told_that_nothing_is_proven(box: P2pBox) -> None:  # CASES C14
    make_tree(
        box.root,
        {
            "sys/class/dmi/id/sys_vendor": "QEMU\n",
            "sys/class/dmi/id/product_name": "Standard PC (Q35 + ICH9, 2009)\n",
        },
    )
    status, document = box.verify()
    (finding,) = document["findings"]
    assert (status, document["verdict"], finding["code"]) == (0, "warning", "virtualised")
    assert "--deep" in finding["remedy"]
    assert document["virtual_machine"] == "QEMU Standard PC (Q35 + ICH9, 2009)"
    assert document["proven"] is False


# --- the simulated driver -------------------------------------------------------------------


@pytest.mark.parametrize(("patched", "status"), [(True, 0), (False, 1)])
def test_the_real_binding_with_the_simulated_driver(
    tmp_path: Path, patched: bool, status: int
) -> None:
    box = simulated_host(tmp_path, 8, patched=patched)
    found, document = box.verify()
    assert (found, document["p2p"]["sources"]) == (status, ["nvml"])
    assert len(document["p2p"]["pairs"]) == 56
