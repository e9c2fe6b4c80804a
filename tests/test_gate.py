"""``gpuguard verify --gate``: waits for nodes, says one line, keeps or removes the proof."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuguard.core.upgrade import Change
from gpuguard.host import LocalHost
from gpuguard.proof import read_gate_result, read_proof
from gpuguard.window import Phase, Window, read_window, write_window
from tests.box import K1, Answer, Box
from tests.building import folder_for_others
from tests.daemon_kit import configure, green_host, lose_patch
from tests.p2pbox import P2pBox, program_environment
from tests.schema import check_verify
from tests.trees import make_tree

BUS = [f"0000:0{number}:00.0" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with folder_for_others() as folder:
        green_host(folder / "host", cards=3)
        yield folder / "host"


@pytest.fixture
def host(base: Path, tmp_path: Path) -> Box:
    """A green host of the test's own, with three cards and their nodes."""
    shutil.copytree(base, tmp_path / "host", symlinks=True)
    configure(tmp_path / "host", gate={"wait_seconds": 0})
    return Box(tmp_path / "host")


def proof_of(host: Box) -> dict[str, Any] | None:
    file = host.root / "run/gpuguard/proof.json"
    return json.loads(file.read_text()) if file.exists() else None


def gate(host: Box, *words: str) -> Answer:
    return host.run("verify", "--gate", *words)


def shut(answer: Answer, status: int, code: str) -> str:
    """The one line of a gate that stays shut."""
    assert answer.status == status
    assert answer.out == ""
    (line,) = answer.err.splitlines()
    assert line.startswith("gpuguard: gate shut: ")
    assert f"[{code}]" in line
    return line


def test_open(host: Box) -> None:
    answer = gate(host)
    assert answer.status == 0
    assert answer.out == (
        "gpuguard: gate open: 3 cards, all 6 ordered pairs granted by nvml, "
        "module 999.10.01 (patched)\n"
    )
    proof = proof_of(host)
    assert proof is not None
    records = sorted((host.root / f"var/lib/gpuguard/builds/{K1}").iterdir())
    built = json.loads(records[-1].read_text())["build_ids"]["nvidia"]
    assert proof["build_id"] == built
    assert (proof["boot_id"], proof["kernel"], proof["pairs"]) == ("boot-1", K1, 6)
    assert (proof["verdict"], proof["identity"], proof["driver"]) == ("ok", "patched", "999.10.01")
    assert len(proof["cards"]) == 3
    assert (host.root / "run/gpuguard/proof.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("p2p", "counted", "together"),
    [
        ({}, 3, 3),
        ({"groups": [BUS[:2]]}, 3, 2),
        ({"groups": [BUS[1:]]}, 3, 1),
        ({"gpus": BUS[:2]}, 3, 2),
        ({"exclude": BUS[2:]}, 2, 2),
        ({"exclude": BUS[:1]}, 2, 1),  # the first one that CUDA shows is not for P2P
    ],
)
def test_which_cards_reach_each_other(
    host: Box, p2p: dict[str, Any], counted: int, together: int
) -> None:
    configure(host.root, p2p=p2p)
    assert gate(host).status == 0
    proof = read_proof(LocalHost(host.root))
    assert proof is not None
    assert (len(proof.cards), proof.visible, proof.together) == (counted, 3, together)


def test_a_proof_that_a_gpuguard_before_left_is_still_one(host: Box) -> None:
    gate(host)
    file = host.root / "run/gpuguard/proof.json"
    document = json.loads(file.read_text())
    for name in ("visible", "together"):
        del document[name]
    file.write_text(json.dumps(document))
    proof = read_proof(LocalHost(host.root))
    assert proof is not None
    assert (proof.pairs, proof.together) == (6, None)


def test_a_proof_is_of_one_boot(host: Box) -> None:
    gate(host)
    assert read_proof(LocalHost(host.root)) is not None
    make_tree(host.root, {"proc/sys/kernel/random/boot_id": "boot-2\n"})
    assert read_proof(LocalHost(host.root)) is None
    assert read_gate_result(LocalHost(host.root)) is None


def test_lost_patch(host: Box) -> None:
    assert gate(host).status == 0
    lose_patch(host.root)
    line = shut(gate(host), 1, "p2p-lost")
    assert "6 of 6 expected ordered pairs" in line
    assert proof_of(host) is None
    result = read_gate_result(LocalHost(host.root))
    assert result is not None
    assert result.verdict == "critical"
    assert f"gpuguard: {result.message}" == line


def test_card_missing(host: Box) -> None:
    configure(host.root, gate={"wait_seconds": 0}, p2p={"expected_gpus": 4})
    line = shut(gate(host), 1, "card-missing")
    assert "(the device nodes did not come in time)" in line
    assert proof_of(host) is None


def test_could_not_look(host: Box) -> None:
    assert gate(host).status == 0
    for library in (host.root / "usr/lib/x86_64-linux-gnu").glob("libnvidia-ml.so*"):
        library.unlink()
    shut(gate(host), 3, "p2p-unknown")
    assert proof_of(host) is None


def test_driver_not_loaded(host: Box) -> None:
    shutil.rmtree(host.root / "proc/driver")
    line = shut(gate(host), 3, "p2p-unknown")
    assert "no NVIDIA driver is loaded" in line
    assert "modprobe nvidia" in line


@pytest.mark.parametrize("expected", [None, 0])
def test_no_card_at_all(tmp_path: Path, expected: int | None) -> None:
    make_tree(tmp_path, {"proc/sys/kernel/osrelease": f"{K1}\n", "sys/bus/pci/devices": None})
    host = Box(tmp_path)
    source = {"source": {"path": "/srv/nvidia"}}
    make_tree(tmp_path, {"etc/gpuguard/gpuguard.yaml": json.dumps(source)})
    configure(tmp_path, p2p={} if expected is None else {"expected_gpus": expected})
    answer = gate(host)
    if expected is None:
        assert "no NVIDIA driver is loaded" in shut(answer, 3, "p2p-unknown")
        assert proof_of(host) is None
    else:
        assert answer.status == 0
        assert "0 cards, all 0 ordered pairs granted, no driver is loaded" in answer.out
        proof = proof_of(host)
        assert proof is not None
        assert (proof["pairs"], proof["cards"], proof["identity"]) == (0, [], "none")


def test_broken_configuration(host: Box) -> None:
    assert gate(host).status == 0
    configure(host.root, gate={"wait": 0})
    answer = gate(host)
    assert answer.status == 78
    assert "[config-invalid]" in answer.err
    assert proof_of(host) is None
    result = read_gate_result(LocalHost(host.root))
    assert result is not None
    assert result.verdict == "unknown"


def test_a_virtual_machine_is_judged_as_verify_does(host: Box) -> None:
    make_tree(
        host.root,
        {"sys/class/dmi/id/sys_vendor": "QEMU\n", "sys/class/dmi/id/product_name": "Standard PC\n"},
    )
    assert host.run("verify").status == 0
    answer = gate(host)
    assert answer.status == 0
    assert "1 more in gpuguard verify" in answer.out
    proof = proof_of(host)
    assert proof is not None
    assert proof["verdict"] == "warning"


def test_a_hung_driver_is_bounded(tmp_path: Path) -> None:
    box = P2pBox(tmp_path, 2).without_nvml("import time; time.sleep(3600)")
    box.smi_script("sleep 3600")
    box.configure()
    configure(tmp_path, gate={"wait_seconds": 0})
    line = shut(box.run("verify", "--gate", "--timeout", "0.5"), 3, "p2p-unknown")
    assert "no result within 0.5 s" in line


def test_json(host: Box) -> None:
    answer = gate(host, "--json")
    document = answer.document
    assert document["gate"] == "open"
    check_verify(document)
    lose_patch(host.root)
    assert gate(host, "--json").document["gate"] == "shut"


@pytest.mark.parametrize("other", ["--deep", "--accept"])
def test_goes_with_nothing_else(host: Box, other: str) -> None:
    assert gate(host).status == 0
    answer = gate(host, other)
    assert answer.status == 2
    assert "--gate goes with neither" in answer.err
    assert proof_of(host) is not None  # nothing was looked at


def test_a_proof_that_cannot_be_written_is_none(host: Box) -> None:
    (host.root / "run").mkdir(exist_ok=True)
    (host.root / "run/gpuguard").write_text("")  # in the place of the folder
    answer = gate(host)
    assert answer.status == 3
    assert "[state-unreadable]" in answer.err


# --- device nodes --------------------------------------------------------------------------


def started(host: Box) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpuguard", "--root", str(host.root), "verify", "--gate"],
        env=program_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_waits_for_the_nodes(host: Box) -> None:
    configure(host.root, gate={"wait_seconds": 600})
    last = host.root / "dev/nvidia2"
    last.unlink()
    with started(host) as process:
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.communicate(timeout=3)
            assert proof_of(host) is None
            last.touch()
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "")
    assert "gate open" in out


def test_where_the_first_client_makes_the_nodes(host: Box) -> None:
    configure(host.root, gate={"wait_seconds": 600})
    shutil.rmtree(host.root / "dev")
    for number in range(3):
        make_tree(host.root, {f"proc/driver/nvidia/gpus/0000:0{number + 1}:00.0/information": ""})
    assert gate(host).status == 0  # and not after an hour


def test_killed_while_it_waits_leaves_no_old_proof(host: Box) -> None:
    assert gate(host).status == 0
    configure(host.root, gate={"wait_seconds": 600})
    shutil.rmtree(host.root / "dev")
    with started(host) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=3)
        process.kill()
    assert proof_of(host) is None


# --- the maintenance window ----------------------------------------------------------------


def waiting_window(host: Box) -> Window:
    window = Window(
        id="20260101T000000Z",
        started="2026-01-01T00:00:00Z",
        boot_id="boot-0",
        changes=(Change(name="linux-image-amd64", old="6.1.1", new="6.1.2"),),
        outcome="done",
    ).entering(Phase.WAITING, "2026-01-01T00:10:00Z")
    write_window(LocalHost(host.root), window)
    return window


def closed_window(host: Box) -> dict[str, Any]:
    assert read_window(LocalHost(host.root)) is None
    file = host.root / "var/lib/gpuguard/windows/20260101T000000Z.json"
    return dict(json.loads(file.read_text()))


def test_closes_the_window_that_waited_for_this_boot(host: Box) -> None:
    waiting_window(host)
    answer = gate(host)
    assert answer.status == 0
    assert "maintenance window 20260101T000000Z is closed, P2P is proven" in answer.err
    assert "linux-image-amd64 6.1.1 -> 6.1.2" in answer.err
    closed = closed_window(host)
    proof = proof_of(host)
    assert proof is not None
    assert closed["verdict"] == "ok"
    assert {"schema": 1, **closed["proof"]} == proof


def test_a_shut_gate_closes_it_without_a_proof(host: Box) -> None:
    waiting_window(host)
    lose_patch(host.root)
    answer = gate(host)
    assert answer.status == 1
    assert "P2P is NOT proven" in answer.err
    closed = closed_window(host)
    assert (closed["verdict"], closed["proof"]) == ("critical", None)


def test_before_the_reboot_the_window_stays(host: Box) -> None:
    waiting_window(host)
    make_tree(host.root, {"proc/sys/kernel/random/boot_id": "boot-0\n"})
    assert gate(host).status == 0
    assert read_window(LocalHost(host.root)) is not None


def test_a_damaged_window_shuts_no_gate(host: Box) -> None:
    make_tree(host.root, {"var/lib/gpuguard/window.json": "{"})
    answer = gate(host)
    assert answer.status == 0
    assert "record could not be closed" in answer.err
    assert os.path.lexists(host.root / "var/lib/gpuguard/window.json")
