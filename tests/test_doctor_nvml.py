"""The child that asks NVML about each card, and what the doctor makes of its answers."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from gpuguard.demo.driver import install_driver
from gpuguard.demo.source import VERSION
from gpuguard.demo.tree import add_cards
from gpuguard.host import LocalHost
from gpuguard.probes.cards_child import collect
from gpuguard.probes.cards_nvml import probe_nvml_cards
from tests import toys
from tests.box import K1
from tests.trees import make_tree


class NvmlError(Exception):
    """As pynvml's."""


def refuse(*_: object) -> NoReturn:
    raise NvmlError("Not Supported")


def library(**changes: Any) -> Any:
    """A binding with two cards that have NVLink between them."""
    known: dict[str, Any] = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetPciInfo": lambda card: SimpleNamespace(busId=f"00000000:0{card + 1}:00.0"),
        "nvmlDeviceGetUUID": lambda card: b"GPU-%d" % card,
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=32 << 30, used=1 << 30),
        "nvmlDeviceGetDisplayActive": lambda card: card,
        "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=7),
        "nvmlDeviceGetP2PStatus": lambda one, other, index: 0 if index == 2 else 6,
        "nvmlDeviceGetComputeRunningProcesses": lambda card: [SimpleNamespace(pid=9)],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda card: [SimpleNamespace(pid=9)],
    }
    return SimpleNamespace(**{k: v for k, v in {**known, **changes}.items() if v is not None})


def test_what_is_asked() -> None:
    answer = collect(library())
    assert answer["problem"] is None
    assert answer["cards"][0] == {
        "bus_id": "00000000:01:00.0",
        "uuid": "GPU-0",
        "memory_bytes": 32 << 30,
        "memory_used_bytes": 1 << 30,
        "display_active": False,
        "utilization_percent": 7,
        "nvlink_peers": ["00000000:02:00.0"],
        "processes": [9],
        "process_bytes": [],
    }
    assert answer["cards"][1]["display_active"] is True


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("nvmlDeviceGetMemoryInfo", "memory_bytes", None),
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes", None),
        ("nvmlDeviceGetDisplayActive", "display_active", None),
        ("nvmlDeviceGetUtilizationRates", "utilization_percent", None),
        ("nvmlDeviceGetP2PStatus", "nvlink_peers", []),
        ("nvmlDeviceGetUUID", "uuid", ""),
    ],
)
@pytest.mark.parametrize("how", [refuse, None], ids=["refuses", "absent"])
def test_what_it_will_not_say_is_not_known(name: str, key: str, value: object, how: Any) -> None:
    answer = collect(library(**{name: how}))
    assert answer["cards"][0][key] == value
    assert answer["problem"] is None


def test_processes_of_an_older_driver() -> None:
    class LibraryMismatchError(Exception):
        pass

    def mismatch(_: object) -> NoReturn:
        raise LibraryMismatchError

    older = library(
        NVMLLibraryMismatchError=LibraryMismatchError,
        nvmlDeviceGetComputeRunningProcesses=mismatch,
        nvmlDeviceGetComputeRunningProcesses_v2=lambda card: [SimpleNamespace(pid=11)],
        nvmlDeviceGetGraphicsRunningProcesses=mismatch,
    )
    assert collect(older)["cards"][0]["processes"] == [11]


def test_a_card_that_cannot_be_opened_is_named() -> None:
    def one(index: int) -> int:
        return refuse() if index else index

    answer = collect(library(nvmlDeviceGetHandleByIndex=one))
    assert len(answer["cards"]) == 1
    assert answer["problem"] == "GPU 1: NvmlError: Not Supported"


def test_no_driver() -> None:
    answer = collect(library(nvmlInit=refuse))
    assert answer == {"cards": [], "problem": "NvmlError: Not Supported"}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="apt-get install gcc")
def test_the_real_binding_on_a_simulated_driver(tmp_path: Path) -> None:
    toys.toy_kernel(tmp_path, K1)
    toys.stock_modules(tmp_path, K1, seed="ok")
    toys.set_running(tmp_path, K1)
    install_driver(tmp_path)
    add_cards(tmp_path, 2)
    version = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {VERSION}  Release\n"
    files = {"proc/driver/nvidia/version": version, "sys/module/nvidia/version": VERSION}
    make_tree(tmp_path, files)
    cards, problem = probe_nvml_cards(LocalHost(tmp_path))
    assert problem is None
    assert len(cards) == 2
    for address, card in cards.items():
        assert (card.bus_id, card.uuid[:4]) == (address, "GPU-")
        assert card.memory_bytes is not None
        assert card.display_active is None  # this driver does not know the question


def test_a_tree_without_the_library_is_not_asked(tmp_path: Path) -> None:
    make_tree(tmp_path, {"proc/driver/nvidia/version": "NVRM version: …\n"})
    cards, problem = probe_nvml_cards(LocalHost(tmp_path))
    assert (cards, problem) == ({}, "there is no libnvidia-ml.so.1 below this root")
