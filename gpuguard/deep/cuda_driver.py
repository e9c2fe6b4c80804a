"""The port by NVIDIA's own bindings: driver API, kernels compiled by NVRTC.

Memory is taken by plain ``cuMemAlloc``. Primary contexts are used, one stream each. The
bindings are imported where they are used: they are the optional extra ``gpuguard[deep]``.
"""

from __future__ import annotations

import ctypes
import importlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gpuguard.deep import kernels
from gpuguard.deep.port import Comparison, CudaCard, CudaError

_THREADS = 512
_BLOCKS_PER_PROCESSOR = 4
_ANSWER_WORDS = 3
_UUID_BYTES = 16


@dataclass(slots=True)
class _Opened:
    """A card in use."""

    context: Any
    stream: Any
    functions: dict[str, Any]
    blocks: int
    answer: int  # address of _ANSWER_WORDS words on the card


class DriverCuda:
    """See ``port.Cuda``."""

    def __init__(self) -> None:
        self._driver: ModuleType = importlib.import_module("cuda.bindings.driver")
        self._opened: dict[int, _Opened] = {}
        self._images: dict[tuple[int, int], bytes] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; one result as it is, several as a tuple.

        Raises:
            CudaError: the driver says anything but success.
        """
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            _, word = self._driver.cuGetErrorName(status)
            _, text = self._driver.cuGetErrorString(status)
            raise CudaError(_decoded(word), _decoded(text), name)
        return results[0] if len(results) == 1 else tuple(results)

    def cards(self) -> tuple[CudaCard, ...]:
        return tuple(self._card(ordinal) for ordinal in range(self.call("cuDeviceGetCount")))

    def _card(self, ordinal: int) -> CudaCard:
        # Bindings of CUDA 12 have both; there the first gives a MIG card its parent's UUID.
        modern = hasattr(self._driver, "cuDeviceGetUuid_v2")
        raw = self.call("cuDeviceGetUuid_v2" if modern else "cuDeviceGetUuid", ordinal)
        number = uuid.UUID(bytes=bytes(raw.bytes)[:_UUID_BYTES])
        bus_id = _decoded(self.call("cuDeviceGetPCIBusId", 32, ordinal))
        name = _decoded(self.call("cuDeviceGetName", 256, ordinal))
        return CudaCard(ordinal, f"GPU-{number}", bus_id, name)

    def can_access(self, accessor: int, owner: int) -> bool:
        return bool(self.call("cuDeviceCanAccessPeer", accessor, owner))

    def enable_access(self, accessor: int, owner: int) -> None:
        peer = self._enter(owner).context
        self._enter(accessor)
        try:
            self.call("cuCtxEnablePeerAccess", peer, 0)
        except CudaError as error:
            if error.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise

    def allocate(self, card: int, length: int) -> int:
        self._enter(card)
        return int(self.call("cuMemAlloc", length))

    def free(self, card: int, address: int) -> None:
        self._enter(card)
        self.call("cuMemFree", address)

    def wait(self, card: int) -> None:
        self.call("cuStreamSynchronize", self._enter(card).stream)

    def fill(self, card: int, address: int, length: int, seed: int) -> None:
        self.launch(card, "fill", length // 8, address, length // 8, seed)

    def spread(self, card: int, address: int, length: int, word: int) -> None:
        self.launch(card, "spread", length // 8, address, length // 8, word)

    def kernel_copy(self, card: int, dst: int, src: int, length: int) -> None:
        self.launch(card, "copy", length // 16 + 1, dst, src, length)

    def engine_copy(self, card: int, dst: int, src: int, length: int) -> None:
        self.call("cuMemcpyDtoDAsync", dst, src, length, self._enter(card).stream)

    def peer_copy(self, dst_card: int, dst: int, src_card: int, src: int, length: int) -> None:
        target = self._enter(dst_card).context
        source = self._enter(src_card)
        self.call("cuMemcpyPeerAsync", dst, target, src, source.context, length, source.stream)

    def compare(self, card: int, address: int, length: int, seed: int) -> Comparison:
        return self.answered(card, "compare", address, length // 8, seed)

    def answered(self, card: int, kernel: str, address: int, words: int, *rest: int) -> Comparison:
        """Run a comparing kernel and fetch what it found."""
        answer = self._clean_answer(card)
        self.launch(card, kernel, words, address, words, *rest, answer)
        mismatches, first, _ = self._answer(card)
        if not mismatches:
            return Comparison(0, None, None)
        self.launch(card, "peek", 1, address, first, answer)
        return Comparison(mismatches, first, self._answer(card)[2])

    def read(self, card: int, address: int, length: int) -> bytes:
        self._enter(card)
        content = ctypes.create_string_buffer(length)
        self.call("cuMemcpyDtoH", ctypes.addressof(content), address, length)
        return content.raw

    def link_chain(self, card: int, address: int, nodes: int, stride: int) -> None:
        self.launch(card, "link_chain", nodes, address, nodes, stride)

    def follow_chain(self, card: int, address: int, stride: int, steps: int) -> None:
        answer = self._enter(card).answer
        self.launch(card, "follow_chain", 1, address, stride, steps, answer, threads=1)

    def chain_end(self, card: int) -> int:
        return self._answer(card)[0]

    def timed(self, card: int, work: Callable[[], None]) -> float:
        stream = self._enter(card).stream
        begin, end = self.call("cuEventCreate", 0), self.call("cuEventCreate", 0)
        self.call("cuEventRecord", begin, stream)
        work()
        self._enter(card)
        self.call("cuEventRecord", end, stream)
        self.call("cuEventSynchronize", end)
        seconds = float(self.call("cuEventElapsedTime", begin, end)) / 1e3
        self.call("cuEventDestroy", begin)
        self.call("cuEventDestroy", end)
        return seconds

    def launch(
        self, card: int, kernel: str, items: int, *arguments: int, threads: int = _THREADS
    ) -> None:
        """Queue a kernel; every argument is a word of 64 bits."""
        opened = self._enter(card)
        blocks = max(1, min(opened.blocks, -(-items // threads)))
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        base = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(arguments))(*(base + 8 * i for i in range(len(values))))
        self.call(
            "cuLaunchKernel", opened.functions[kernel], blocks, 1, 1, threads, 1, 1, 0,
            opened.stream, ctypes.addressof(pointers), 0,
        )  # fmt: skip

    def stream(self, card: int) -> int:
        """The card's stream, as other libraries take it."""
        return int(self._enter(card).stream)

    def _enter(self, card: int) -> _Opened:
        """Make a card the current one; opens it first."""
        if card not in self._opened:
            self._open(card)
        opened = self._opened[card]
        self.call("cuCtxSetCurrent", opened.context)
        return opened

    def _open(self, card: int) -> None:
        context = self.call("cuDevicePrimaryCtxRetain", card)
        self.call("cuCtxSetCurrent", context)
        attribute = self._driver.CUdevice_attribute
        processors, major, minor = (
            int(self.call("cuDeviceGetAttribute", getattr(attribute, word), card))
            for word in (
                "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
                "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
                "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
            )
        )
        if (major, minor) not in self._images:
            self._images[major, minor] = compiled(major, minor)
        module = self.call("cuModuleLoadData", self._images[major, minor])
        self._opened[card] = _Opened(
            context=context,
            stream=self.call("cuStreamCreate", 1),  # non-blocking: not tied to stream 0
            functions={
                name: self.call("cuModuleGetFunction", module, name.encode())
                for name in kernels.NAMES
            },
            blocks=processors * _BLOCKS_PER_PROCESSOR,
            answer=int(self.call("cuMemAlloc", 8 * _ANSWER_WORDS)),
        )

    def _clean_answer(self, card: int) -> int:
        # On the stream: a copy from pageable memory may still be under way when it returns.
        opened = self._enter(card)
        for word, byte in enumerate((0, 0xFF, 0)):
            self.call("cuMemsetD8Async", opened.answer + 8 * word, byte, 8, opened.stream)
        return opened.answer

    def _answer(self, card: int) -> tuple[int, ...]:
        self.wait(card)
        content = self.read(card, self._opened[card].answer, 8 * _ANSWER_WORDS)
        return tuple(
            int.from_bytes(content[8 * i : 8 * i + 8], "little") for i in range(_ANSWER_WORDS)
        )


def compiled(major: int, minor: int) -> bytes:
    """The kernels as machine code for a compute capability; needs NVRTC, but no card.

    Raises:
        CudaError: NVRTC is older than the card, or rejects the source.
    """
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    status, program = nvrtc.nvrtcCreateProgram(kernels.SOURCE.encode(), b"deep.cu", 0, [], [])
    _nvrtc_ok(nvrtc, status, "nvrtcCreateProgram")
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status) != 0:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError("NVRTC", f"sm_{major}{minor}: {_decoded(log).strip()}", "compile")
    status, size = nvrtc.nvrtcGetCUBINSize(program)
    _nvrtc_ok(nvrtc, status, "nvrtcGetCUBINSize")
    image: bytes = b" " * size  # the binding writes into it
    (status,) = nvrtc.nvrtcGetCUBIN(program, image)
    _nvrtc_ok(nvrtc, status, "nvrtcGetCUBIN")
    return image


def _nvrtc_ok(nvrtc: ModuleType, status: Any, call: str) -> None:
    if int(status) != 0:
        _, text = nvrtc.nvrtcGetErrorString(status)
        raise CudaError("NVRTC", _decoded(text), call)


def _decoded(value: bytes | str) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return text.partition("\0")[0]  # the bindings give the whole buffer: "0000:00:06.0\0    "
