"""A stand-in for NVIDIA's bindings: the calls that gpuguard makes, on the CPU's memory.

A module ``standin_options`` on the path has ``CARDS`` (how many), ``MIRROR`` ("0-1": what
card 0 writes to card 1, or reads there, comes back to itself) and, if it likes, ``HANG`` ("0-1":
a copy from card 0 to card 1 never ends). Kernels are the real source, compiled for the CPU. Addresses are checked, access between
cards must have been opened, and strings come back padded, as the real bindings give them.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.deep_cpu import TYPES, Kernels, build

_SUCCESS, _INVALID, _NO_MEMORY, _ILLEGAL, _ALREADY = 0, 1, 2, 700, 704
_NAMES = {
    _INVALID: b"CUDA_ERROR_INVALID_VALUE",
    _NO_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    _ILLEGAL: b"CUDA_ERROR_ILLEGAL_ADDRESS",
    _ALREADY: b"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
}
_OPTIONS = importlib.import_module("standin_options")
_LIMIT = 64 << 20

_buffers: dict[int, tuple[int, Any]] = {}  # address -> card, memory
_open: set[tuple[int, int]] = set()
_events: dict[int, float] = {}
_current: list[int] = [-1]
_kernels: list[Kernels] = []


class CUdevice_attribute:
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class _Uuid:
    def __init__(self, card: int) -> None:
        self.bytes = bytes([card] * 16)


def cuInit(_flags: int) -> tuple[int]:
    return (_SUCCESS,)


def cuGetErrorName(status: int) -> tuple[int, bytes]:
    return _SUCCESS, _NAMES[status]


def cuGetErrorString(status: int) -> tuple[int, bytes]:
    return _SUCCESS, _NAMES[status].lower()


def cuDeviceGetCount() -> tuple[int, int]:
    return _SUCCESS, _OPTIONS.CARDS


def cuDeviceGetUuid(card: int) -> tuple[int, _Uuid]:
    return _SUCCESS, _Uuid(card)


def cuDeviceGetPCIBusId(_length: int, card: int) -> tuple[int, bytes]:
    return _SUCCESS, f"0000:0{card + 1}:00.0".encode() + b"\0     "


def cuDeviceGetName(_length: int, _card: int) -> tuple[int, bytes]:
    return _SUCCESS, b"Stand-in" + b"\0" * 20


def cuDeviceGetAttribute(attribute: int, _card: int) -> tuple[int, int]:
    return _SUCCESS, {16: 2, 75: 9, 76: 0}[attribute]


def cuDeviceCanAccessPeer(one: int, other: int) -> tuple[int, int]:
    return _SUCCESS, int(one != other)


def cuDevicePrimaryCtxRetain(card: int) -> tuple[int, int]:
    return _SUCCESS, card


def cuCtxSetCurrent(context: int) -> tuple[int]:
    _current[0] = context
    return (_SUCCESS,)


def cuCtxEnablePeerAccess(peer: int, _flags: int) -> tuple[int]:
    if (_current[0], peer) in _open:
        return (_ALREADY,)
    _open.add((_current[0], peer))
    return (_SUCCESS,)


def cuStreamCreate(flags: int) -> tuple[int, int]:
    assert flags == 1  # non-blocking
    return _SUCCESS, 1000 + _current[0]


def cuStreamSynchronize(stream: int) -> tuple[int]:
    return (_SUCCESS if stream == 1000 + _current[0] else _INVALID,)


def cuMemAlloc(length: int) -> tuple[int, ...]:
    if length > _LIMIT:
        return (_NO_MEMORY,)
    memory = ctypes.create_string_buffer(length)
    _buffers[ctypes.addressof(memory)] = _current[0], memory
    return _SUCCESS, ctypes.addressof(memory)


def cuMemFree(address: int) -> tuple[int]:
    return (_INVALID if _buffers.pop(address, None) is None else _SUCCESS,)


def cuMemcpyDtoDAsync(dst: int, src: int, length: int, stream: int) -> tuple[int]:
    return _move(dst, src, length, stream)


def cuMemcpyPeerAsync(
    dst: int, to: int, src: int, start: int, length: int, stream: int
) -> tuple[int]:
    if (_owner(dst, length), _owner(src, length)) != (to, start):
        return (_INVALID,)
    return _move(dst, src, length, stream)


def cuMemcpyDtoH(host: int, src: int, length: int) -> tuple[int]:
    if _owner(src, length) != _current[0]:
        return (_ILLEGAL,)
    ctypes.memmove(host, src, length)
    return (_SUCCESS,)


def cuMemsetD8Async(dst: int, value: int, length: int, _stream: int) -> tuple[int]:
    if _owner(dst, length) != _current[0]:
        return (_ILLEGAL,)
    ctypes.memset(dst, value, length)
    return (_SUCCESS,)


def cuModuleLoadData(_image: bytes) -> tuple[int, int]:
    if not _kernels:
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        _kernels.append(Kernels(build(Path(folder.name))))
    return _SUCCESS, 1


def cuModuleGetFunction(_module: int, name: bytes) -> tuple[int, str]:
    return _SUCCESS, name.decode()


def cuLaunchKernel(name: str, *words: int) -> tuple[int]:
    *shape, _shared, stream, parameters, extra = words
    assert (shape[1:3], shape[4:6], extra) == ([1, 1], [1, 1], 0)
    if stream != 1000 + _current[0]:
        return (_INVALID,)
    types = TYPES[name]
    pointers = (ctypes.c_void_p * len(types)).from_address(parameters)
    values = [ctypes.c_uint64.from_address(pointer or 0).value for pointer in pointers]
    for number, kind in enumerate(types):
        if kind.endswith("*"):
            owner = _owner(values[number], 8)
            if owner is None or not _reaches(owner):
                return (_ILLEGAL,)
            values[number] = _seen(values[number], owner)
    _kernels[0].run(name, *values, grid=(shape[0], shape[3]))
    return (_SUCCESS,)


def cuEventCreate(_flags: int) -> tuple[int, int]:
    _events[len(_events)] = 0.0
    return _SUCCESS, len(_events) - 1


def cuEventRecord(event: int, _stream: int) -> tuple[int]:
    _events[event] = time.perf_counter()
    return (_SUCCESS,)


def cuEventSynchronize(_event: int) -> tuple[int]:
    return (_SUCCESS,)


def cuEventElapsedTime(begin: int, end: int) -> tuple[int, float]:
    return _SUCCESS, 1e3 * (_events[end] - _events[begin])


def cuEventDestroy(_event: int) -> tuple[int]:
    return (_SUCCESS,)


def _move(dst: int, src: int, length: int, stream: int) -> tuple[int]:
    while f"{_owner(src, length)}-{_owner(dst, length)}" == getattr(_OPTIONS, "HANG", ""):
        time.sleep(1)
    owners = _owner(dst, length), _owner(src, length)
    if stream != 1000 + _current[0]:
        return (_INVALID,)
    if not all(owner is not None and _reaches(owner) for owner in owners):
        return (_ILLEGAL,)
    ctypes.memmove(_seen(dst, owners[0]), _seen(src, owners[1]), length)
    return (_SUCCESS,)


def _owner(address: int, length: int) -> int | None:
    for begin, (card, memory) in _buffers.items():
        if begin <= address and address + length <= begin + len(memory):
            return card
    return None


def _reaches(owner: int) -> bool:
    return owner == _current[0] or (_current[0], owner) in _open


def _seen(address: int, owner: int | None) -> int:
    """Where an access really goes: a mirrored aperture leads back to the card itself."""
    if owner == _current[0] or f"{_current[0]}-{owner}" != _OPTIONS.MIRROR:
        return address
    begin = max(b for b in _buffers if b <= address)
    size = len(_buffers[begin][1])
    own = [b for b, (card, m) in _buffers.items() if card == _current[0] and len(m) == size]
    return own[0] + (address - begin)
