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
_SHOWN_PROBLEMS = 3


def collect(nvml: ModuleType) -> dict[str, Any]:
    """Cards and ordered pairs: ``{"gpus", "pairs", "lost", "problem", "error"}``.

    ``lost`` has the cards that cannot be reached and why, ``error`` the name of the exception
    that kept everything else from being told.
    """
    try:
        nvml.nvmlInit()
    except _errors(nvml) as error:
        return _nothing(error)
    try:
        return _collect(nvml)
    except _errors(nvml) as error:
        return _nothing(error)
    finally:
        with suppress(*_errors(nvml)):
            nvml.nvmlShutdown()


def _nothing(error: Exception) -> dict[str, Any]:
    name = type(error).__name__
    return {"gpus": [], "pairs": [], "lost": [], "problem": _named(error), "error": name}


def _collect(nvml: ModuleType) -> dict[str, Any]:
    cards: list[tuple[Any, dict[str, Any]]] = []
    lost, problems = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            cards.append((handle, _card(nvml, handle, index)))
        except _errors(nvml) as error:
            lost.append((f"GPU {index}", _named(error)))
    pairs = []
    for a, one in cards:
        for b, other in cards:
            if one is not other:
                pair = {"src": one["uuid"], "dst": other["uuid"]}
                for capability, number in _CAPS_INDEX.items():
                    pair[capability], problem = _status(nvml, a, b, number)
                    if problem:
                        problems.append(f"{pair['src']} -> {pair['dst']} {capability}: {problem}")
                pairs.append(pair)
    if len(problems) > _SHOWN_PROBLEMS:
        problems[_SHOWN_PROBLEMS:] = [f"and {len(problems) - _SHOWN_PROBLEMS} more"]
    return {
        "gpus": [card for _, card in cards],
        "pairs": pairs,
        "lost": lost,
        "problem": "; ".join([*(f"{name}: {said}" for name, said in lost), *problems]) or None,
        "error": None,
    }


def _card(nvml: ModuleType, handle: Any, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "pci_bus_id": _text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        "name": _text(nvml.nvmlDeviceGetName(handle)),
    }


def _status(nvml: ModuleType, one: Any, other: Any, capability: int) -> tuple[str, str]:
    """The word for it, and what went wrong."""
    try:
        value = int(nvml.nvmlDeviceGetP2PStatus(one, other, capability))
    except _errors(nvml) as error:
        return _UNKNOWN, _named(error)
    if 0 <= value < len(_STATUS):
        return _STATUS[value], ""
    return _UNKNOWN, f"status {value}, which this version does not know"


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
        answer = _nothing(error)
    else:
        answer = collect(pynvml)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
