"""The NVML child, with a fake binding that fails the way real ones do."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gpuguard.probes.nvml_child import collect


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
    assert answer["problem"].startswith(f"GPU-2 -> GPU-0 read: {type(error).__name__}: ")


def test_a_lost_card_is_named_and_the_rest_is_told() -> None:
    nvml = FakeNvml(4)
    nvml.lost = (1,)
    answer = collected(nvml)
    assert [gpu["uuid"] for gpu in answer["gpus"]] == ["GPU-0", "GPU-2", "GPU-3"]
    assert len(answer["pairs"]) == 6
    assert answer["lost"] == [("GPU 1", "GpuIsLost: GPU is lost")]
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


def test_the_child_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuguard.probes.nvml_child"],
        capture_output=True, check=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert done.stdout.startswith('{"gpus": [')
