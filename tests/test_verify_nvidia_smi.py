"""The real ``nvidia-smi`` of the distribution on the simulated driver, beside the real binding."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuguard.demo.driver import LIBRARY_DIR
from gpuguard.probes.nvidia_smi import parse_topo_p2p
from tests import realroot
from tests.p2pbox import bus_id, simulated_host

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program() -> Path:
    """Debian's nvidia-smi, unpacked from its package; nothing is installed."""
    lab = realroot.Lab(realroot.cache_dir() / "apt")
    try:
        lab.update()
        (package,) = lab.download("nvidia-smi")
        unpacked = package.with_suffix("")
        subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
        return next(unpacked.rglob("current/nvidia-smi"))
    except (OSError, subprocess.CalledProcessError, StopIteration) as error:
        reason = f"Debian's nvidia-smi is not to be had ({error}): needs apt-get and a network"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)


@pytest.mark.parametrize(("patched", "token"), [(True, "OK"), (False, "CNS")])
def test_it_agrees_with_nvml(tmp_path: Path, program: Path, patched: bool, token: str) -> None:
    box = simulated_host(tmp_path, 8, patched=patched)
    (box.root / "usr/bin").mkdir()
    shutil.copy(program, box.root / "usr/bin/nvidia-smi")
    status, document = box.verify()
    assert status == (0 if patched else 1)
    assert document["p2p"]["sources"] == ["nvml", "nvidia-smi"]
    assert {f["code"] for f in document["findings"]} == (set() if patched else {"p2p-lost"})
    for source in document["sources"]:
        assert {(p["read"], p["write"]) for p in source["pairs"]} == {(token, token)}
        assert len(source["pairs"]) == 56


def test_it_alone(tmp_path: Path, program: Path) -> None:
    box = simulated_host(tmp_path, 3)
    box.without_nvml()
    shutil.rmtree(box.root / "proc/driver/nvidia/gpus")  # then it is asked for bus ids, too
    (box.root / "usr/bin").mkdir()
    shutil.copy(program, box.root / "usr/bin/nvidia-smi")
    status, document = box.verify()
    assert (status, document["p2p"]["sources"]) == (0, ["nvidia-smi"])
    assert [gpu["pci_bus_id"] for gpu in document["p2p"]["gpus"]] == list(map(bus_id, (1, 2, 3)))


@pytest.mark.parametrize(
    ("version", "reason"), [("999.10.02", "version-mismatch"), (None, "no-driver")]
)
def test_its_own_exit_codes(
    tmp_path: Path, program: Path, version: str | None, reason: str
) -> None:
    box = simulated_host(tmp_path, 2)
    (box.root / "usr/bin").mkdir()
    shutil.copy(program, box.root / "usr/bin/nvidia-smi")
    if version is None:  # the module that would be loaded is gone
        shutil.rmtree(box.root / "lib/modules")
    else:
        (box.root / "sys/module/nvidia").mkdir(parents=True)
        (box.root / "sys/module/nvidia/version").write_text(f"{version}\n")
    status, document = box.verify()
    assert status == 3
    assert [source["reason"] for source in document["sources"]] == [reason, reason]
    (finding,) = [f for f in document["findings"] if f["code"] == "p2p-unknown"]
    assert finding["evidence"]["reason"] == reason


def test_its_matrix_of_sixteen_cards(tmp_path: Path, program: Path) -> None:
    box = simulated_host(tmp_path, 16)
    done = subprocess.run(
        [program, "topo", "-p2p", "r"],
        env={**os.environ, "LD_LIBRARY_PATH": str(box.root / LIBRARY_DIR)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(parse_topo_p2p(done.stdout)) == 16 * 15
