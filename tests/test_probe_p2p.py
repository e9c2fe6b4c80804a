"""P2P: nvidia-smi's matrix, NVML in a child, and what happens when they fail."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from gpuguard.core.facts import Gpu, P2pFacts, P2pPair
from gpuguard.errors import ProbeError
from gpuguard.host import LocalHost
from gpuguard.probes import p2p
from gpuguard.probes.nvidia_smi import parse_gpu_list, parse_topo_p2p
from gpuguard.probes.p2p import (
    normal_bus_id,
    probe_answers,
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


# --- the probe ------------------------------------------------------------------------------


def test_no_driver_loaded(tmp_path: Path) -> None:
    assert probe_p2p(LocalHost(tmp_path)) == P2pFacts(
        problem="no NVIDIA driver is loaded", reason="no-driver"
    )


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


HANDLE = "Unable to determine the device handle for GPU0000:A1:00.0: Unknown Error"


@pytest.mark.parametrize(
    ("script", "reason", "said"),
    [
        ("echo NVIDIA-SMI has failed because it couldn\\'t; exit 9", "no-driver", "with 9: NVIDIA"),
        ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18",
         "version-mismatch", "exited with 18"),
        ("echo No devices were found", "no-devices", "exited with 0: No devices were found"),
        ("echo No devices were found; exit 6", "no-devices", "exited with 6: No devices"),
        ("echo sh: nvidia-smi: not found >&2; exit 127", "tool-missing", "exited with 127"),
        ("exit 0", "empty-output", "printed nothing"),
        ("printf '\\n\\r\\n'", "empty-output", "printed nothing"),
        (f"echo {HANDLE}; exit 255", "card-unreachable", "Unknown Error"),
        ("echo Segmentation fault; kill -SEGV $$", "failed", "exited with -11"),
        ("printf '\\377\\001'", "unreadable-output", "no P2P matrix"),
        (f"[ $1 = -L ] && printf '{LIST}' || printf ' GPU0\\n GPU0 X\\n'",
         "unreadable-output", "2 cards are listed"),
        ("[ $1 = -L ] && echo none || printf ' GPU0\\n GPU0 X\\n'",
         "unreadable-output", "0 cards are listed"),
    ],
)  # fmt: skip
def test_states_of_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str, said: str
) -> None:
    answers = probe_answers(nvidia_smi(tmp_path, monkeypatch, script), 5)
    assert answers["nvml"].reason == "binding-missing"
    facts = answers["nvidia-smi"]
    assert (facts.source, facts.reason) == (None, reason)
    assert said in (facts.problem or "")
    assert facts.lost == ((("0000:a1:00.0", "Unknown Error"),) if "255" in script else ())


def test_no_nvidia_smi_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = nvidia_smi(tmp_path, monkeypatch, "")
    (tmp_path / "bin/nvidia-smi").unlink()
    facts = probe_answers(host, 5)["nvidia-smi"]
    assert (facts.source, facts.reason) == (None, "tool-missing")


def test_a_root_is_asked_by_its_own_nvidia_smi_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, "touch $0.was-run")
    assert probe_answers(LocalHost(tmp_path), 5)["nvidia-smi"].reason == "tool-missing"
    assert not (tmp_path / "bin/nvidia-smi.was-run").exists()
