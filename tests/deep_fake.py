"""A driver without cards: memory as bytes, links with faults. For tests of the deep check.

``python -m tests.deep_fake FAULTS REQUEST`` is the child over it, so that hangs are real.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuguard.core.deep_pattern import WORD, mix
from gpuguard.deep.child import answer, emit
from gpuguard.deep.port import Comparison, CudaCard, CudaError

GIB_PER_SECOND = 1e9
_SHIFT = 40  # an address is card << 40 | offset


@dataclass(frozen=True)
class Fault:
    """What goes wrong on accesses across a link.

    Args:
        kind: mirror, zeros, nan, lost, page, bit, hang, crash, die, memory, refused, local.
        src: of the ordered pair; None: every pair.
        dst: likewise.
        engine: "copy" or "kernel"; None: both.
    """

    kind: str
    src: int | None = None
    dst: int | None = None
    engine: str | None = None

    def hits(self, kind: str, actor: int, owner: int, *, writes: bool, engine: str) -> bool:
        src, dst = (actor, owner) if writes else (owner, actor)
        return (
            self.kind == kind
            and self.src in (None, src)
            and self.dst in (None, dst)
            and self.engine in (None, engine)
        )


@dataclass
class FakeCuda:
    """See ``port.Cuda``; ``rates`` overrides bytes per second of an ordered pair."""

    count: int = 2
    faults: Sequence[Fault] = ()
    rates: dict[str, float] = field(default_factory=dict)  # "0-1" -> bytes per second
    default_rate: float = 20e9
    memory: dict[int, bytearray] = field(default_factory=dict)
    _next: dict[int, int] = field(default_factory=dict)
    _clock: float = 0.0
    _node: int = 0

    def cards(self) -> tuple[CudaCard, ...]:
        return tuple(
            CudaCard(n, f"GPU-{n}", f"0000:0{n + 1}:00.0", "Fake") for n in range(self.count)
        )

    def can_access(self, accessor: int, owner: int) -> bool:
        return not any(
            f.kind == "refused" and f.src in (None, accessor) and f.dst in (None, owner)
            for f in self.faults
        )

    def enable_access(self, accessor: int, owner: int) -> None:
        pass

    def allocate(self, card: int, length: int) -> int:
        if any(f.kind == "memory" and f.src in (None, card) for f in self.faults):
            raise CudaError("CUDA_ERROR_OUT_OF_MEMORY", "out of memory", "cuMemAlloc")
        address = card << _SHIFT | self._next.setdefault(card, 1 << 20)
        self._next[card] += length + (1 << 20)
        # Behind a buffer lies something else: writes beyond it are not noticed by the driver.
        self.memory[address] = bytearray(b"\xee" * (length + 8192))
        return address

    def free(self, card: int, address: int) -> None:
        del self.memory[address]

    def wait(self, card: int) -> None:
        pass

    def fill(self, card: int, address: int, length: int, seed: int) -> None:
        self._write(card, address, _words(seed, length), "kernel")

    def spread(self, card: int, address: int, length: int, word: int) -> None:
        self._write(card, address, word.to_bytes(WORD, "little") * (length // WORD), "kernel")

    def kernel_copy(self, card: int, dst: int, src: int, length: int) -> None:
        self._move(card, dst, src, length, "kernel")

    def engine_copy(self, card: int, dst: int, src: int, length: int) -> None:
        self._move(card, dst, src, length, "copy")

    def peer_copy(self, dst_card: int, dst: int, src_card: int, src: int, length: int) -> None:
        self._move(src_card, dst, src, length, "copy")

    def compare(self, card: int, address: int, length: int, seed: int) -> Comparison:
        have = self._read(card, address, length, "kernel")
        want = _words(seed, length)
        wrong = [at for at in range(0, length, WORD) if have[at : at + 8] != want[at : at + 8]]
        if not wrong:
            return Comparison(0, None, None)
        found = int.from_bytes(have[wrong[0] : wrong[0] + 8], "little")
        return Comparison(len(wrong), wrong[0] // WORD, found)

    def read(self, card: int, address: int, length: int) -> bytes:
        return self._read(card, address, length, "copy")

    def link_chain(self, card: int, address: int, nodes: int, stride: int) -> None:
        pass

    def follow_chain(self, card: int, address: int, stride: int, steps: int) -> None:
        self._node = steps
        self._clock += steps * 1e-6

    def chain_end(self, card: int) -> int:
        return self._node

    def timed(self, card: int, work: Callable[[], None]) -> float:
        begin = self._clock
        work()
        return self._clock - begin

    def _move(self, card: int, dst: int, src: int, length: int, engine: str) -> None:
        rate = self.rates.get(f"{src >> _SHIFT}-{dst >> _SHIFT}", self.default_rate)
        self._clock += length / rate
        self._write(card, dst, self._read(card, src, length, engine), engine)

    def _write(self, actor: int, address: int, data: bytes, engine: str) -> None:
        owner = address >> _SHIFT
        if owner != actor:
            address, data = self._spoiled(actor, owner, address, data, engine)
        elif any(f.kind == "local" and f.src in (None, actor) for f in self.faults):
            data = bytes(len(data))
        base = self._base(address)
        offset = address - base
        self.memory[base][offset : offset + len(data)] = data

    def _spoiled(
        self, actor: int, owner: int, address: int, data: bytes, engine: str
    ) -> tuple[int, bytes]:
        def hit(kind: str) -> bool:
            return any(f.hits(kind, actor, owner, writes=True, engine=engine) for f in self.faults)

        self._break(hit)
        if hit("mirror"):
            address = self._mirrored(actor, address)
        elif hit("page"):
            address += 4096
        elif hit("lost"):
            data = b""
        return address, _spoiled_data(data, hit)

    def _read(self, actor: int, address: int, length: int, engine: str) -> bytes:
        owner = address >> _SHIFT

        def hit(kind: str) -> bool:
            return owner != actor and any(
                f.hits(kind, actor, owner, writes=False, engine=engine) for f in self.faults
            )

        self._break(hit)
        if hit("mirror"):
            address = self._mirrored(actor, address)
        base = self._base(address)
        offset = address - base + (4096 if hit("page") else 0)
        data = bytes(self.memory[base][offset : offset + length])
        return b"\xff" * length if hit("lost") else _spoiled_data(data, hit)

    def _break(self, hit: Callable[[str], bool]) -> None:
        if hit("hang"):
            time.sleep(600)
        if hit("crash"):
            raise CudaError("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access", "cuLaunch")
        if hit("die"):
            os.abort()

    def _mirrored(self, actor: int, address: int) -> int:
        """The same offset in a buffer of the actor's own: what a mirrored aperture does."""
        own = next(base for base in self.memory if base >> _SHIFT == actor)
        return own + (address - self._base(address))

    def _base(self, address: int) -> int:
        return max(base for base in self.memory if base <= address)


def _spoiled_data(data: bytes, hit: Callable[[str], bool]) -> bytes:
    if hit("zeros"):
        return bytes(len(data))
    if hit("nan"):
        return b"\xff\xff\xff\x7f" * (len(data) // 4)
    if hit("bit") and len(data) > 4096:  # one bit, far from every sample
        return data[:40000] + bytes([data[40000] ^ 1]) + data[40001:]
    return data


def _words(seed: int, length: int) -> bytes:
    key = (seed, length)
    if key not in _KNOWN:
        _KNOWN[key] = b"".join(
            mix(seed + i).to_bytes(WORD, "little") for i in range(length // WORD)
        )
    return _KNOWN[key]


_KNOWN: dict[tuple[int, int], bytes] = {}


def main() -> None:
    """The child, with the cards that its first argument describes."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    request = json.loads(sys.argv[2])
    if request["mode"] == "look":
        emit("look", **options["look"])
        emit("end")
        return
    if request["mode"] == "collective":
        _collective(options.get("collective", {}))
        return
    emit("step", name="start", engine=None)
    faults = [Fault(**fault) for fault in options.get("faults", ())]
    answer(FakeCuda(options["count"], faults, options.get("rates", {})), request)


def _collective(options: dict[str, Any]) -> None:
    emit("step", name="collective", engine=None)
    off = os.environ.get("NCCL_P2P_DISABLE") == "1"
    how = options.get("off" if off else "on", "ok")
    via = "SHM/direct/direct" if off else options.get("via", "P2P/direct pointer")
    os.write(1, f"host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {via}\n".encode())
    os.write(1, b"host:1:2 [0] NCCL INFO Connec")  # its buffer is full: the rest comes later
    if how == "hang":
        time.sleep(600)
    emit("collective", outcome=how, version="2.99.0", detail="")
    emit("end")


if __name__ == "__main__":
    main()
