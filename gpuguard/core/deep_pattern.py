"""The bytes that are sent: every word tells where it belongs, and can be asked.

Word ``i`` of a transfer is ``mix(tag << 32 | i)``. ``mix`` is a bijection (the finaliser of
splitmix64), so a word found in a wrong place says which transfer and which place it is from:
a page too far, another pair's data, or the poison that nothing has overwritten. The same
arithmetic is in ``deep/kernels.py``, in CUDA C.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

WORD = 8  # bytes
_MASK = (1 << 64) - 1
_MAGIC = 0xA5
_POISON_INDEX = (1 << 32) - 1
_MUL_1, _MUL_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_INV_1, _INV_2 = pow(_MUL_1, -1, 1 << 64), pow(_MUL_2, -1, 1 << 64)
_NAN32 = 0x7F800000


@dataclass(frozen=True, slots=True)
class Tag:
    """What sets one transfer apart: ordered pair, engine, span; 6, 6, 8 and 4 bits."""

    src: int
    dst: int
    engine: int
    span: int

    @property
    def seed(self) -> int:
        """What the word's index is added to before mixing."""
        tag = _MAGIC << 24 | self.src << 18 | self.dst << 12 | self.engine << 4 | self.span
        return tag << 32

    @property
    def poison(self) -> int:
        """The word that fills the destination before this transfer."""
        return mix(self.seed | _POISON_INDEX)

    def word(self, index: int) -> int:
        """The word at an index, counted from the begin of the transfer."""
        return mix(self.seed + index)

    def words(self, first: int, count: int) -> bytes:
        """A run of words as they lie in memory (little-endian)."""
        return struct.pack(f"<{count}Q", *(self.word(first + i) for i in range(count)))


def mix(value: int) -> int:
    """The finaliser of splitmix64: a bijection on 64 bits."""
    value = ((value ^ value >> 30) * _MUL_1) & _MASK
    value = ((value ^ value >> 27) * _MUL_2) & _MASK
    return value ^ value >> 31


def unmix(value: int) -> int:
    """The reverse of ``mix``."""
    value = ((_unshift(value, 31)) * _INV_2) & _MASK
    value = ((_unshift(value, 27)) * _INV_1) & _MASK
    return _unshift(value, 30)


def origin(value: int) -> tuple[Tag, int] | None:
    """Transfer and index that a word belongs to; None for a word that is none of ours."""
    plain = unmix(value)
    tag, index = plain >> 32, plain & _POISON_INDEX
    if tag >> 24 != _MAGIC:
        return None
    return Tag(tag >> 18 & 63, tag >> 12 & 63, tag >> 4 & 255, tag & 15), index


def describe(found: int, tag: Tag, index: int) -> str:
    """What a wrong word is, in words; ``index`` is where it was found."""
    return _described_bits(found) or _described_origin(found, tag, index)


def _described_bits(found: int) -> str | None:
    if found == 0:
        return "zeros"
    if found == _MASK:
        return "all ones, as a read from nowhere gives (NaN as a number)"
    if all(_is_nan32(half) for half in (found & 0xFFFFFFFF, found >> 32)):
        return "NaN"
    return None


def _described_origin(found: int, tag: Tag, index: int) -> str:
    known = origin(found)
    if known is None:
        return "foreign bytes"
    other, place = known
    if place == _POISON_INDEX:
        return "nothing arrived" if other == tag else "what an earlier check left there"
    if other == tag:
        return f"the right data {abs(place - index) * WORD} bytes off"
    if (other.src, other.dst) == (tag.src, tag.dst):
        return "data of an earlier transfer between these cards"
    return f"data of the transfer from card {other.src} to card {other.dst}"


def runs(length: int, sample: int) -> Iterator[tuple[int, int]]:
    """(first word, words) of the samples a host reads back: begin, middle, end."""
    words, some = length // WORD, min(sample, length) // WORD
    for first in sorted({0, (words - some) // 2, words - some}):
        yield first, some


def _is_nan32(bits: int) -> bool:
    return bits & _NAN32 == _NAN32 and bits & 0x7FFFFF != 0


def _unshift(value: int, shift: int) -> int:
    """Undo ``x ^ x >> shift``."""
    result = value
    for _ in range(64 // shift + 1):
        result = value ^ result >> shift
    return result
