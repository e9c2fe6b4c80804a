"""Ask NVML about each card and print one JSON object; run by ``probes.cards_nvml`` only.

A process of its own, because NVML may hang in the kernel beyond any signal (CASES C49).
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

_CAPS_INDEX_NVLINK = 2  # literals from nvml.h, as in nvml_child
_OK = 0
_PROCESS_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
#: The binding's own name asks the newest form and refuses an older driver (R450 to R510 have _v2).
_FORMS = ("", "_v2")


def collect(nvml: ModuleType) -> dict[str, Any]:
    """``{"cards": [...], "problem": str | None}``; a value that NVML will not give is None."""
    errors = _errors(nvml)
    try:
        nvml.nvmlInit()
    except errors as error:
        return {"cards": [], "problem": _named(error)}
    cards: list[tuple[Any, dict[str, Any]]] = []
    problems: list[str] = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                cards.append((handle, _card(nvml, handle)))
            except errors as error:
                problems.append(f"GPU {index}: {_named(error)}")
        for handle, card in cards:
            others = ((peer, other["bus_id"]) for peer, other in cards if other is not card)
            card["nvlink_peers"] = [name for peer, name in others if _linked(nvml, handle, peer)]
    except errors as error:
        problems.append(_named(error))
    finally:
        with suppress(*errors):
            nvml.nvmlShutdown()
    return {"cards": [card for _, card in cards], "problem": "; ".join(problems) or None}


def _linked(nvml: ModuleType, one: Any, other: Any) -> bool:
    try:
        return int(nvml.nvmlDeviceGetP2PStatus(one, other, _CAPS_INDEX_NVLINK)) == _OK
    except _errors(nvml):
        return False


def _card(nvml: ModuleType, handle: Any) -> dict[str, Any]:
    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except _errors(nvml):
            return None

    processes = _processes(nvml, handle)
    return {
        "bus_id": _text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        "uuid": _text(ask(lambda: nvml.nvmlDeviceGetUUID(handle)) or ""),
        "memory_bytes": ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        "memory_used_bytes": ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
        "display_active": ask(lambda: bool(nvml.nvmlDeviceGetDisplayActive(handle))),
        "utilization_percent": ask(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        "nvlink_peers": [],
        "processes": sorted(processes),
        "process_bytes": sorted((p, used) for p, used in processes.items() if used is not None),
    }


def _processes(nvml: ModuleType, handle: Any) -> dict[int, int | None]:
    """Process -> its memory; in both lists it is the same memory. None: NVML would not say."""
    found: dict[int, int | None] = {}
    for name in _PROCESS_LISTS:
        for form in _FORMS:
            try:
                entries = getattr(nvml, name + form)(handle)
                for entry in entries:
                    used = getattr(entry, "usedGpuMemory", None)
                    known = found.get(int(entry.pid))
                    found[int(entry.pid)] = known if used is None else max(int(used), known or 0)
                break
            except _errors(nvml):
                continue
    return found


def _errors(nvml: ModuleType) -> tuple[type[Exception], ...]:
    # Besides NVML's own: a binding whose names or argument types have moved (CASES C51).
    mismatch = getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)  # is no NVMLError
    return (
        nvml.NVMLError,
        mismatch,
        ctypes.ArgumentError,
        AttributeError,
        TypeError,
        ValueError,
        OSError,
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def main() -> None:
    """Print the answer; the exit status says nothing."""
    try:
        import pynvml
    except ImportError as error:
        answer: dict[str, Any] = {"cards": [], "problem": _named(error)}
    else:
        answer = collect(pynvml)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
