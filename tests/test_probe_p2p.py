"""P2P: nvidia-smi's matrix, NVML in a child, and what happens when they fail."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuguard.core.facts import Gpu, P2pFacts, P2pPair
from gpuguard.errors import ProbeError
from gpuguard.host import LocalHost
from gpuguard.probes import p2p
from gpuguard.probes.nvml_child import collect
from gpuguard.probes.p2p import (
    normal_bus_id,
    parse_gpu_list,
    parse_topo_p2p,
    probe_p2p,
    probe_pci_gpus,
)
from tests.trees import make_tree

GOLDEN = Path(__file__).parent / "golden"
READ = (GOLDEN / "nvidia-smi-580-topo-p2p-r.txt").read_text()
LEGEND = (
    "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"
    "  GNS  = GPU not supported\n  TNS  = Topology not supported\n  NS   = Not supported\n"
    "  U    = Unknown\n"
)
LOADED = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module"}


def matrix(size: int, status: str = "OK") -> str:
    names = [f"GPU{i}" for i in range(size)]
    rows = [
        " " + "\t".join([name, *("X" if name == peer else status for peer in names)]) + "\t\n"
        for name in names
    ]
    return " \t\x1b[4m" + "\t".join(names) + "\t\x1b[0m\n" + "".join(rows) + LEGEND


# --- text of nvidia-smi ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "status"), [("r", "OK"), ("w", "OK"), ("p", "NS")])
def test_two_h200_with_driver_580(name: str, status: str) -> None:
    text = (GOLDEN / f"nvidia-smi-580-topo-p2p-{name}.txt").read_text()
    assert parse_topo_p2p(text) == {(0, 1): status, (1, 0): status}


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12])
def test_every_ordered_pair(size: int) -> None:
    found = parse_topo_p2p(matrix(size, "CNS"))
    assert len(found) == size * (size - 1)
    assert set(found.values()) <= {"CNS"}


@pytest.mark.parametrize("status", ["GNS", "TNS", "NS", "DR", "U", "XYZ"])
def test_status_words_are_kept_verbatim(status: str) -> None:
    assert parse_topo_p2p(READ.replace("OK\t", f"{status}\t")) == {(0, 1): status, (1, 0): status}


def test_one_bad_direction() -> None:
    text = " \tGPU0\tGPU1\t\n GPU0\tX\tCNS\t\n GPU1\tOK\tX\t\n" + LEGEND
    assert parse_topo_p2p(text) == {(0, 1): "CNS", (1, 0): "OK"}


@pytest.mark.parametrize(
    "form",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\t\n", "\n"),
        lambda text: text.replace("\t", "    "),
        lambda text: text.replace("\x1b[4m", "").replace("\x1b[0m", ""),
        lambda text: "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n\n" + text,
        lambda text: text.split("\nLegend")[0],
        lambda text: text.replace("\x1b[0m", "\x1b[0;1;31m\x1b[K"),
    ],
)
def test_other_forms_of_the_same_matrix(form: Any) -> None:
    assert parse_topo_p2p(form(READ)) == {(0, 1): "OK", (1, 0): "OK"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        LEGEND,
        "Unable to determine the device handle for GPU0000:A1:00.0: Unknown Error\n",
        " \tGPU0\tGPU1\t\n",  # no rows
        " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n",  # a row short
        " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\t\n",  # a cell short
        " \tGPU0\tGPU1\t\n GPU0\tX\tOK\tOK\t\n GPU1\tOK\tX\t\n",  # a cell too many
        " \tGPU0\tGPU1\t\n GPU0\tOK\tOK\t\n GPU1\tOK\tX\t\n",  # no X at itself
        " \tGPU0\tGPU1\t\n GPU1\tX\tOK\t\n GPU0\tOK\tX\t\n",  # rows in another order
        " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n GPU2\tOK\tOK\t\n",
        "\x00\x1b[\xff" * 200,
    ],
)
def test_what_is_no_square_matrix(text: str) -> None:
    with pytest.raises(ProbeError):
        parse_topo_p2p(text)


def test_gpu_list_without_mig_lines() -> None:
    text = (
        "GPU 0: NVIDIA GeForce RTX 5090 (UUID: GPU-aa)\n"
        "GPU 1: NVIDIA H100 80GB HBM3 (SXM) (UUID: GPU-bb)\n"
        "  MIG 3g.40gb     Device  0: (UUID: MIG-cc)\n"
    )
    assert parse_gpu_list(text) == (
        (0, "GPU-aa", "NVIDIA GeForce RTX 5090"),
        (1, "GPU-bb", "NVIDIA H100 80GB HBM3 (SXM)"),
    )


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("00000000:01:00.0", "0000:01:00.0"), ("00000000:A1:00.0", "0000:a1:00.0"),
        ("0000:01:00.0", "0000:01:00.0"), ("00010000:01:00.0", "10000:01:00.0"),
    ],
)  # fmt: skip
def test_bus_ids(given: str, normal: str) -> None:
    assert normal_bus_id(given) == normal


# --- PCI ------------------------------------------------------------------------------------


def test_cards_on_the_bus(tmp_path: Path) -> None:
    devices = {
        "0000:01:00.0": ("0x10de", "0x030000"), "0000:01:00.1": ("0x10de", "0x040300"),
        "0000:41:00.0": ("0x10de", "0x030200"), "0000:00:02.0": ("0x8086", "0x030000"),
        "0000:81:00.0": ("0x10de", "0x068000"),
    }  # fmt: skip
    top = "/sys/bus/pci/devices"
    for name, (vendor, kind) in devices.items():
        make_tree(tmp_path, {f"{top}/{name}/vendor": f"{vendor}\n"})
        make_tree(tmp_path, {f"{top}/{name}/class": f"{kind}\n"})
    make_tree(tmp_path, {f"{top}/0000:99:00.0": None})
    assert probe_pci_gpus(LocalHost(tmp_path)) == ("0000:01:00.0", "0000:41:00.0")


def test_no_bus_at_all(tmp_path: Path) -> None:
    assert probe_pci_gpus(LocalHost(tmp_path)) == ()


# --- NVML, with a fake binding --------------------------------------------------------------


class NvmlError(Exception):
    """Stands for pynvml.NVMLError."""


class GpuIsLost(NvmlError):  # noqa: N818
    """Stands for NVMLError_GpuIsLost."""


class FakeNvml(SimpleNamespace):
    """The few calls that the child makes; ``status`` is indexed by (src, dst, capability)."""

    NVMLError = NvmlError
    NVML_P2P_CAPS_INDEX_READ = (0,)  # the trap: a tuple

    def __init__(self, cards: int = 2, **status: Any) -> None:
        super().__init__(cards=cards, status=status.pop("status", {}), lost=(), calls=[])

    def nvmlInit(self) -> None:  # noqa: N802
        self.calls.append("init")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return int(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index in self.lost:
            raise GpuIsLost("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:  # noqa: N802
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"NVIDIA GeForce RTX 5090"

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:0{handle}:00.0".encode())

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: object) -> int:  # noqa: N802
        if not isinstance(capability, int):
            raise ctypes.ArgumentError("argument 3: Don't know how to convert parameter 3")
        found = self.status.get((one, other, capability), 0)
        if isinstance(found, Exception):
            raise found
        return int(found)


def collected(nvml: FakeNvml) -> dict[str, Any]:
    return collect(nvml)  # type: ignore[arg-type]


def test_fake_with_the_tuple_constant() -> None:
    answer = collected(FakeNvml(4))
    assert len(answer["pairs"]) == 12
    assert {(p["read"], p["write"]) for p in answer["pairs"]} == {("OK", "OK")}
    assert answer["problem"] is None


@pytest.mark.parametrize(
    ("value", "word"),
    [(1, "CNS"), (2, "GNS"), (3, "TNS"), (4, "DR"), (5, "NS"), (6, "U"), (9, "U"), (-1, "U")],
)
def test_status_numbers_of_nvml_h(value: int, word: str) -> None:
    answer = collected(FakeNvml(status={(0, 1, 1): value}))
    assert answer["pairs"][0] == {"src": "GPU-0", "dst": "GPU-1", "read": "OK", "write": word}


@pytest.mark.parametrize(
    "error", [NvmlError("Not Supported"), GpuIsLost("lost"), ctypes.ArgumentError("3"), TypeError()]
)
def test_an_error_on_one_pair_is_that_pairs_own(error: Exception) -> None:
    answer = collected(FakeNvml(3, status={(2, 0, 0): error}))
    unknown = [p for p in answer["pairs"] if "U" in p.values()]
    assert unknown == [{"src": "GPU-2", "dst": "GPU-0", "read": "U", "write": "OK"}]
    assert answer["problem"] is None


def test_a_lost_card_is_named_and_the_rest_is_told() -> None:
    nvml = FakeNvml(4)
    nvml.lost = (1,)
    answer = collected(nvml)
    assert [gpu["uuid"] for gpu in answer["gpus"]] == ["GPU-0", "GPU-2", "GPU-3"]
    assert len(answer["pairs"]) == 6
    assert answer["problem"] == "GPU 1: GpuIsLost: GPU is lost"
    assert nvml.calls == ["init", "shutdown"]


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()

    def fail() -> None:
        raise NvmlError("NVML Shared Library Not Found")

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    answer = collected(nvml)
    assert answer["problem"] == "NvmlError: NVML Shared Library Not Found"
    assert nvml.calls == []


def test_shutdown_after_a_failure_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCount")
    assert "nvmlDeviceGetCount" in collected(nvml)["problem"]
    assert nvml.calls == ["init", "shutdown"]


# --- the probe ------------------------------------------------------------------------------


def test_no_driver_loaded(tmp_path: Path) -> None:
    assert probe_p2p(LocalHost(tmp_path)) == P2pFacts(problem="no NVIDIA driver is loaded")


NVML_C = r"""
#include <stdio.h>
#include <string.h>
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int e) { return e == 15 ? "GPU is lost" : "error"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, long *h) { *h = i + 1; return i == LOST ? 15 : 0; }
int nvmlDeviceGetUUID(long h, char *s, unsigned n) { return snprintf(s, n, "GPU-%ld", h) < 0; }
int nvmlDeviceGetName(long h, char *s, unsigned n) { return snprintf(s, n, "Card %ld", h) < 0; }
struct pci { char legacy[16]; unsigned u[5]; char bus[32]; };
int nvmlDeviceGetPciInfo_v3(long h, struct pci *p)
{ memset(p, 0, sizeof *p); sprintf(p->bus, "00000000:%02lX:00.0", h + 159); return 0; }
int nvmlDeviceGetP2PStatus(long a, long b, int cap, int *s)
{ *s = cap == 0 ? (a == 1 && b == 2) : 5; return cap > 1; }
"""


def nvml_tree(root: Path, *, lost: int = 99) -> LocalHost:
    """A root with a library of its own that the real binding loads."""
    make_tree(root, LOADED)
    folder = root / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    (root / "nvml.c").write_text(NVML_C)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-DLOST={lost}", "-o", folder / "libnvidia-ml.so.1",
         root / "nvml.c"],
        check=True,
    )  # fmt: skip
    return LocalHost(root)


def test_the_real_binding_with_the_roots_own_library(tmp_path: Path) -> None:
    facts = probe_p2p(nvml_tree(tmp_path))
    assert (facts.source, facts.problem) == ("nvml", None)
    assert facts.gpus[1] == Gpu(index=1, uuid="GPU-2", pci_bus_id="0000:a1:00.0", name="Card 2")
    assert len(facts.pairs) == 6
    assert facts.pairs[0] == P2pPair(src="GPU-1", dst="GPU-2", read="CNS", write="NS")
    assert {p.read for p in facts.pairs[1:]} == {"OK"}


def test_the_real_binding_names_a_lost_card(tmp_path: Path) -> None:
    facts = probe_p2p(nvml_tree(tmp_path, lost=0))
    assert [gpu.index for gpu in facts.gpus] == [1, 2]
    assert facts.problem == "GPU 0: NVMLError_GpuIsLost: GPU is lost"


def test_the_real_binding_without_any_library(tmp_path: Path) -> None:
    facts = probe_p2p(LocalHost(make_tree(tmp_path, LOADED)))
    if facts.source is not None:
        pytest.skip("there is a driver on this machine")
    assert "NVMLError_LibraryNotFound" in (facts.problem or "")


def test_library_that_is_no_library(tmp_path: Path) -> None:
    make_tree(tmp_path, {**LOADED, "/usr/lib64/libnvidia-ml.so.1": b"garbage"})
    facts = probe_p2p(LocalHost(tmp_path))
    assert facts.source is None
    assert facts.problem


def fake_binding(folder: Path, code: str) -> None:
    make_tree(folder, {"/pynvml.py": code})


@pytest.mark.parametrize(
    "code",
    ["print('not json')", "import os; os._exit(3)", "raise SyntaxError", "1 +", "print('[]')"],
)
def test_a_child_that_breaks_is_a_problem_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    fake_binding(tmp_path / "binding", code)
    monkeypatch.syspath_prepend(tmp_path / "binding")
    facts = probe_p2p(LocalHost(make_tree(tmp_path / "root", LOADED)))
    assert facts.source is None
    assert facts.problem


def test_a_child_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)\n"
    fake_binding(tmp_path / "binding", code)
    monkeypatch.syspath_prepend(tmp_path / "binding")
    monkeypatch.setattr(p2p, "_DEADLINE", 1.0)
    began = time.monotonic()
    facts = probe_p2p(LocalHost(make_tree(tmp_path / "root", LOADED)))
    assert time.monotonic() - began < 20
    assert "no result within 1 s" in (facts.problem or "")


def test_nothing_is_imported_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_binding(tmp_path, "open('was-here', 'w')")
    monkeypatch.chdir(tmp_path)
    probe_p2p(LocalHost(make_tree(tmp_path / "root", LOADED)))
    assert not (tmp_path / "was-here").exists()


class LiveTree(LocalHost):
    """A tree that claims to be the machine itself, so that nvidia-smi is asked."""

    @property
    def is_live(self) -> bool:
        return True

    def path(self, absolute: str, *, follow: bool = True) -> Path:
        return self.root / absolute.lstrip("/")


def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> LiveTree:
    """A live host with this nvidia-smi first in PATH, and without NVML."""
    make_tree(tmp_path, {**LOADED, "/bin/nvidia-smi": f"#!/bin/sh\n{script}"})
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    fake_binding(tmp_path / "binding", "raise ImportError('no pynvml')")
    monkeypatch.syspath_prepend(tmp_path / "binding")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    return LiveTree(tmp_path)


LIST = "".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})\\n" for i in range(2))


def test_nvidia_smi_where_nvml_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = GOLDEN / "nvidia-smi-580-topo-p2p-r.txt"
    host = nvidia_smi(
        tmp_path,
        monkeypatch,
        f"[ \"$1\" = -L ] && printf '{LIST}' && exit\n"
        f"[ \"$*\" = 'topo -p2p r' ] && cat {golden} && exit\n"
        f"[ \"$*\" = 'topo -p2p w' ] && sed s/OK/CNS/g {golden} && exit\nexit 2\n",
    )
    information = "Model: NVIDIA H200\nGPU UUID:   \t GPU-1\nBus Location: \t 0000:00:07.0\n"
    make_tree(tmp_path, {"/proc/driver/nvidia/gpus/0000:00:07.0/information": information})
    facts = probe_p2p(host)
    assert (facts.source, facts.problem) == ("nvidia-smi", None)
    assert facts.gpus[1] == Gpu(
        index=1, uuid="GPU-1", pci_bus_id="0000:00:07.0", name="NVIDIA H200"
    )
    assert facts.pairs == (
        P2pPair(src="GPU-0", dst="GPU-1", read="OK", write="CNS"),
        P2pPair(src="GPU-1", dst="GPU-0", read="OK", write="CNS"),
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo NVIDIA-SMI has failed because it cannot; exit 9", "exited with 9: NVIDIA-SMI has"),
        ("echo Failed to initialize NVML: Driver/library mismatch; exit 18", "exited with 18"),
        ("echo No devices were found", "no P2P matrix in: No devices were found"),
        ("echo No devices were found; exit 6", "exited with 6: No devices"),
        ("exit 127", "exited with 127"),
        ("exit 0", "no P2P matrix in: (nothing)"),
        ("printf '\\377\\000'", "no P2P matrix"),
        (f"[ $1 = -L ] && printf '{LIST}' || printf ' GPU0\\n GPU0 X\\n'", "2 cards are listed"),
        ("[ $1 = -L ] || printf ' GPU0\\n GPU0 X\\n'", "0 cards are listed"),
    ],
)
def test_states_of_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    facts = probe_p2p(nvidia_smi(tmp_path, monkeypatch, script))
    assert facts.source is None
    assert "no pynvml" in (facts.problem or "")
    assert said in (facts.problem or "")


def test_the_child_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuguard.probes.nvml_child"],
        capture_output=True, check=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert done.stdout.startswith('{"gpus": [')
