"""Ask NVML about P2P and print the answer as one JSON object; run by ``probes.p2p`` only.

A process of its own, because NVML may hang in the kernel beyond any signal (CASES C49), and
because the library of another root can be loaded only by a fresh process.
"""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

# Literals from nvml.h: pynvml.NVML_P2P_CAPS_INDEX_READ is the tuple (0,) in nvidia-ml-py
# (12.535 to 13.615), which ctypes rejects.
_CAPS_INDEX = {"read": 0, "write": 1}
#: nvmlGpuP2PStatus_t; the words are those of the legend of ``nvidia-smi topo -p2p``.
_STATUS = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")
_UNKNOWN = "U"


def collect(nvml: ModuleType) -> dict[str, Any]:
    """Cards and ordered pairs: ``{"gpus": [...], "pairs": [...], "problem": str | None}``."""
    try:
        nvml.nvmlInit()
    except _errors(nvml) as error:
        return {"gpus": [], "pairs": [], "problem": _named(error)}
    try:
        return _collect(nvml)
    except _errors(nvml) as error:
        return {"gpus": [], "pairs": [], "problem": _named(error)}
    finally:
        with suppress(*_errors(nvml)):
            nvml.nvmlShutdown()


def _collect(nvml: ModuleType) -> dict[str, Any]:
    cards: list[tuple[Any, dict[str, Any]]] = []
    problems = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            cards.append((handle, _card(nvml, handle, index)))
        except _errors(nvml) as error:
            problems.append(f"GPU {index}: {_named(error)}")
    pairs = [
        {
            "src": one["uuid"],
            "dst": other["uuid"],
            **{cap: _status(nvml, a, b, index) for cap, index in _CAPS_INDEX.items()},
        }
        for a, one in cards
        for b, other in cards
        if one is not other
    ]
    gpus = [card for _, card in cards]
    return {"gpus": gpus, "pairs": pairs, "problem": "; ".join(problems) or None}


def _card(nvml: ModuleType, handle: Any, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "pci_bus_id": _text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        "name": _text(nvml.nvmlDeviceGetName(handle)),
    }


def _status(nvml: ModuleType, one: Any, other: Any, capability: int) -> str:
    try:
        value = int(nvml.nvmlDeviceGetP2PStatus(one, other, capability))
    except _errors(nvml):
        return _UNKNOWN
    return _STATUS[value] if 0 <= value < len(_STATUS) else _UNKNOWN


def _errors(nvml: ModuleType) -> tuple[type[Exception], ...]:
    # Besides NVML's own: a binding whose names or argument types have moved (CASES C51).
    return (nvml.NVMLError, ctypes.ArgumentError, AttributeError, TypeError, ValueError, OSError)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def main() -> None:
    """Print the answer; the exit status says nothing."""
    try:
        import pynvml
    except ImportError as error:
        answer: dict[str, Any] = {"gpus": [], "pairs": [], "problem": _named(error)}
    else:
        answer = collect(pynvml)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
