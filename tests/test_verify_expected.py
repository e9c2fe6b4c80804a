"""``gpuguard verify``: against what it is held, what is accepted, and how it looks to people."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gpuguard.accepted import write_accepted
from gpuguard.core.facts import Gpu
from gpuguard.errors import PrivilegeError
from gpuguard.host import LocalHost
from tests.p2pbox import P2pBox, bus_id, matrix, program_environment, uuid
from tests.trees import make_tree
from tests.unprivileged import as_nobody, public_dir

HANDLE = "Unable to determine the device handle for GPU0000:04:00.0: Unknown Error"


@pytest.fixture
def box(tmp_path: Path) -> P2pBox:
    """Four cards, everything OK by both sources."""
    return P2pBox(tmp_path / "host").nvml().smi()


# --- what is expected -----------------------------------------------------------------------


def test_a_number(box: P2pBox) -> None:
    box.configure(expected_gpus=5)
    status, document = box.verify()
    (finding,) = document["findings"]
    assert (status, finding["code"], finding["subject"]) == (1, "card-missing", "1 card")
    assert "5 cards expected by the configuration" in finding["message"]


def test_cards_by_uuid_and_bus_id(box: P2pBox) -> None:
    box.configure(gpus=[uuid(1).upper().replace("GPU-", "gpu-"), "00000000:02:00.0", "03:00.0"])
    status, document = box.verify()
    assert (status, [f["code"] for f in document["findings"]]) == (0, ["card-unexpected"])
    assert document["expectation"]["pairs"] == 6


def test_a_card_in_another_slot_is_another_card(box: P2pBox) -> None:
    box.configure(gpus=[bus_id(n) for n in (1, 2, 3, 9)])
    status, document = box.verify()
    found = {f["code"]: f for f in document["findings"]}
    assert (status, found["card-missing"]["subject"]) == (1, bus_id(9))
    assert found["card-missing"]["evidence"][bus_id(9)] == "not on the PCI bus"
    assert found["card-unexpected"]["subject"] == bus_id(4)


def test_groups_of_several_generations(box: P2pBox) -> None:
    cells = {f"c{a}_{b}": "CNS" for a in (0, 1) for b in (2, 3)}
    cells |= {f"c{b}_{a}": "CNS" for a in (0, 1) for b in (2, 3)}
    box.without_nvml().smi(read=matrix(4, **cells))
    assert box.verify()[0] == 1
    box.configure(groups=[[bus_id(1), bus_id(2)], [uuid(3), uuid(4)]])
    status, document = box.verify()
    assert (status, document["expectation"]["pairs"]) == (0, 4)
    box.smi(read=matrix(4, **cells, c2_3="CNS"))
    assert box.verify()[0] == 1


def test_a_state_that_was_accepted(box: P2pBox) -> None:
    status, document = box.verify("--accept")
    assert (status, document["accepted_now"]) == (0, True)
    kept = json.loads((box.root / "var/lib/gpuguard/p2p-accepted.json").read_text())
    assert kept["schema"] == 1
    assert kept["gpus"][0] == {
        "uuid": uuid(1), "pci_bus_id": bus_id(1), "name": "NVIDIA GeForce RTX 5090",
    }  # fmt: skip
    assert len(kept["pairs"]) == 12
    box.seen = [1, 2, 4]
    box.nvml().smi()
    status, document = box.verify()
    assert document["expectation"]["source"] == "accepted"
    assert document["expectation"]["accepted"] == kept["accepted"]
    finding = document["findings"][0]
    assert (status, finding["code"], finding["subject"]) == (1, "card-missing", uuid(3))
    assert bus_id(3) in finding["message"]


def test_what_was_accepted_includes_which_pairs_have_no_p2p(box: P2pBox) -> None:
    box.without_nvml().smi(read=matrix(4, c0_1="CNS", c1_0="CNS"))
    answer = box.run("verify", "--accept")
    assert answer.status == 0
    assert "accepted: 4 cards, 10 of 12 ordered pairs OK" in answer.out
    assert box.verify()[0] == 0
    box.smi(read=matrix(4, c0_1="CNS", c1_0="CNS", c2_3="CNS"))
    assert box.verify()[0] == 1


def test_the_configuration_outranks_what_was_accepted(box: P2pBox) -> None:
    box.verify("--accept")
    box.configure(expected_gpus=4)
    assert box.verify()[1]["expectation"]["source"] == "configuration"


@pytest.mark.parametrize("script", ["exit 9", "echo No devices were found", f"echo '{HANDLE}'"])
def test_nothing_is_accepted_where_nobody_could_look(box: P2pBox, script: str) -> None:
    answer = box.without_nvml().smi_script(script).run("--json", "verify", "--accept")
    assert (answer.status, answer.error["code"]) == (70, "accept-refused")
    assert not (box.root / "var").exists()


@pytest.mark.parametrize(
    ("read", "write"),
    [(matrix(4, "CNS"), matrix(4, "CNS")), (matrix(4), matrix(4, c0_1="CNS"))],
    ids=["no pair at all", "sources disagree"],
)
def test_what_nobody_can_want_is_not_accepted(box: P2pBox, read: str, write: str) -> None:
    if read != write:
        box.nvml()
    else:
        box.without_nvml()
    answer = box.smi(read=read, write=write).run("--json", "verify", "--accept")
    assert answer.error["code"] == "accept-refused"


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 2}', "[1]", '{"schema":1,"gpus":[{}]}'])
def test_an_accepted_state_that_cannot_be_read_is_no_absent_one(box: P2pBox, content: str) -> None:
    make_tree(box.root, {"var/lib/gpuguard/p2p-accepted.json": content})
    answer = box.run("--json", "verify")
    assert (answer.status, answer.error["code"]) == (3, "state-unreadable")


def test_accepting_needs_write_access() -> None:
    with public_dir() as folder:
        make_tree(folder, {"var/lib": None})
        gpus = (Gpu(index=0, uuid=uuid(1), pci_bus_id=bus_id(1), name="RTX 5090"),)
        (folder / "var/lib").chmod(0o555)
        with as_nobody(), pytest.raises(PrivilegeError):
            write_accepted(LocalHost(folder), gpus, (), now="2026-11-29T18:00:00Z")


# --- for people -----------------------------------------------------------------------------


def test_the_matrix_is_the_one_that_people_know(box: P2pBox) -> None:
    box.nvml({"0 1 0": 1, "0 1 1": 1}).smi(read=matrix(4, c0_1="CNS"))
    text = box.run("verify").out
    assert text.startswith(
        "gpuguard verify: critical\n\nP2P read and write (nvml and nvidia-smi agree)\n"
    )
    rows = re.findall(r"^  (?:GPU\d)? +(?:GPU0|X|OK).*$", text, re.MULTILINE)
    assert [row.split() for row in rows] == [
        ["GPU0", "GPU1", "GPU2", "GPU3"],
        ["GPU0", "X", "CNS", "OK", "OK"],
        ["GPU1", "OK", "X", "OK", "OK"],
        ["GPU2", "OK", "OK", "X", "OK"],
        ["GPU3", "OK", "OK", "OK", "X"],
    ]
    assert "4 cards, 12 ordered pairs (as on the PCI bus)" in text
    assert "11 of 12 expected ordered pairs OK" in text
    assert "\x1b" not in text


def test_a_matrix_for_read_and_one_for_write(box: P2pBox) -> None:
    box.nvml({"0 1 1": 1}).smi(read=matrix(4), write=matrix(4, c0_1="CNS"))
    text = box.run("verify").out
    assert "P2P read (nvml and nvidia-smi agree)" in text
    assert "P2P write (nvml and nvidia-smi agree)" in text


def test_colours_are_for_terminals(box: P2pBox) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "gpuguard", "--root", str(box.root), "verify"]
    environment = program_environment(box.root / "binding")
    with subprocess.Popen(command, env=environment, stdout=theirs) as program:
        os.close(theirs)
        text = b""
        with suppress(OSError):  # EIO: the program has ended
            while chunk := os.read(ours, 4096):
                text += chunk
    os.close(ours)
    assert program.returncode == 0
    assert b"\x1b[32mOK\x1b[0m" in text


def test_options(box: P2pBox) -> None:
    assert box.run("verify", "--timeout", "0").status == 2
    assert box.run("verify", "--timeout", "5").status == 0
