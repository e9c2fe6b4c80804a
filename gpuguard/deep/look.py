"""The child's look through NVML: cards, the links at their edge, who computes on them."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from types import ModuleType
from typing import Any

from gpuguard.deep.transfer import Emit

# Literals from nvml.h, as in probes.nvml_child.
_CAPS_NVLINK = 2
_STATUS_OK = 0
_STATUS_UNKNOWN = 6
_MAX_LINKS = 18  # NVML_NVLINK_MAX_LINKS
_REMOTE_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
#: Fields that give a link's speed in MB/s: one link's (580), then that of all links alike.
_FIELD_LINK_SPEED, _FIELD_COMMON_SPEED = 164, 90


def look(nvml: ModuleType, emit: Emit) -> None:
    """Emit ``look`` once: cards with links, pairs joined by NVLink, compute processes."""
    try:
        nvml.nvmlInit()
    except errors(nvml) as error:
        emit("look", problem=f"{type(error).__name__}: {error}")
        return
    handles = {}
    cards = []
    for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0):
        handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
        if handle is not None and (card := _card(nvml, handle, index)) is not None:
            handles[card["uuid"]] = handle
            cards.append(card)
    emit(
        "look",
        cards=cards,
        nvlinked=_nvlinked(nvml, handles),
        processes=[p for uuid, handle in handles.items() for p in _processes(nvml, handle, uuid)],
        problem=None if cards else "NVML reports no cards",
    )
    with suppress(*errors(nvml)):
        nvml.nvmlShutdown()


def errors(nvml: ModuleType) -> tuple[type[Exception], ...]:
    """What a call may raise: NVML's own, and a binding whose names or types have moved."""
    return (nvml.NVMLError, ctypes.ArgumentError, AttributeError, TypeError, ValueError, OSError)


def _card(nvml: ModuleType, handle: Any, index: int) -> dict[str, Any] | None:
    uuid = _ask(nvml, "nvmlDeviceGetUUID", handle)
    pci = _ask(nvml, "nvmlDeviceGetPciInfo", handle)
    if uuid is None or pci is None:
        return None
    return {
        "index": index,
        "uuid": _text(uuid),
        "pci_bus_id": _text(pci.busId),
        "name": _text(_ask(nvml, "nvmlDeviceGetName", handle) or ""),
        "pcie_generation": _ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "pcie_width": _ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        "memory_free_bytes": _free(nvml, handle),
        "nvlinks": _nvlinks(nvml, handle),
    }


def _free(nvml: ModuleType, handle: Any) -> int | None:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return None if memory is None else int(memory.free)


def _nvlinks(nvml: ModuleType, handle: Any) -> list[dict[str, Any]] | None:
    """Active links; empty for a card without any, None if NVML does not know the question."""
    if not hasattr(nvml, "nvmlDeviceGetNvLinkState"):
        return None
    return [
        {
            "remote_bus_id": _remote_bus_id(nvml, handle, link),
            "to_switch": _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            == _REMOTE_SWITCH,
            "bytes_per_second": _speed(nvml, handle, link),
        }
        for link in range(_MAX_LINKS)
        if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) == 1
    ]


def _remote_bus_id(nvml: ModuleType, handle: Any, link: int) -> str | None:
    pci = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
    return None if pci is None else _text(pci.busId)


def _speed(nvml: ModuleType, handle: Any, link: int) -> float | None:
    fields = [(_FIELD_LINK_SPEED, link), _FIELD_COMMON_SPEED]
    for value in _ask(nvml, "nvmlDeviceGetFieldValues", handle, fields) or ():
        if value.nvmlReturn == 0 and value.value.uiVal > 0:
            return float(value.value.uiVal) * 1e6
    return None


def _nvlinked(nvml: ModuleType, handles: dict[str, Any]) -> list[tuple[str, str, bool | None]]:
    answers = []
    for src, one in handles.items():
        for dst, other in handles.items():
            if src != dst:
                status = _ask(nvml, "nvmlDeviceGetP2PStatus", one, other, _CAPS_NVLINK)
                known = status is not None and status != _STATUS_UNKNOWN
                answers.append((src, dst, status == _STATUS_OK if known else None))
    return answers


def _processes(nvml: ModuleType, handle: Any, uuid: str) -> list[dict[str, Any]]:
    found = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or ()
    return [{"pid": int(p.pid), "uuid": uuid} for p in found if int(p.pid) != os.getpid()]


def _ask(nvml: ModuleType, question: str, *arguments: Any) -> Any:
    """The answer; None if there is none, or if the binding does not know the question."""
    try:
        return getattr(nvml, question)(*arguments)
    except errors(nvml):
        return None


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
