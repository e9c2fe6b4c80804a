"""The kernels' arithmetic, compiled for the CPU; and for real cards, where NVRTC is installed."""

from __future__ import annotations

import ctypes
import importlib.util
import random
import shutil

import pytest

from gpuguard.core.deep_pattern import Tag
from gpuguard.deep import kernels
from tests.deep_cpu import TYPES, Kernels, build


class Memory:
    """Bytes with an address."""

    def __init__(self, length: int) -> None:
        self.raw = ctypes.create_string_buffer(length)
        self.at = ctypes.addressof(self.raw)

    def word(self, index: int) -> int:
        return int.from_bytes(self.raw.raw[8 * index : 8 * index + 8], "little")


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed: apt-get install gcc")
    return Kernels(build(tmp_path_factory.mktemp("kernels")))


def test_every_kernel_is_tried() -> None:
    assert set(TYPES) == set(kernels.NAMES)


@pytest.mark.parametrize("offset", [0, 8, 13])
def test_fill_is_the_pattern_and_compare_finds_every_difference(cpu: Kernels, offset: int) -> None:
    tag, words = Tag(3, 5, 2, 1), 1000
    memory, answer = Memory(8 * words + 64), Memory(24)
    cpu.run("fill", memory.at + offset, words, tag.seed)
    assert memory.raw.raw[offset : offset + 8 * words] == tag.words(0, words)
    assert memory.raw.raw[:offset] == bytes(offset)
    assert memory.raw.raw[offset + 8 * words :] == bytes(64 - offset)  # nothing beyond
    for wrong in (set(), {0}, {999}, {7, 500, 501}):
        spoilt = Memory(8 * words + 64)
        ctypes.memmove(spoilt.at, memory.raw, 8 * words + 64)
        for index in wrong:
            bit = random.Random(index).randrange(64)
            at = offset + 8 * index + bit // 8
            spoilt.raw[at] = bytes([spoilt.raw.raw[at] ^ 1 << bit % 8])
        ctypes.memmove(answer.at, b"\0" * 8 + b"\xff" * 8 + b"\0" * 8, 24)
        cpu.run("compare", spoilt.at + offset, words, tag.seed, answer.at)
        first = min(wrong, default=(1 << 64) - 1)
        assert (answer.word(0), answer.word(1)) == (len(wrong), first)
        if wrong:
            cpu.run("peek", spoilt.at + offset, first, answer.at, grid=(1, 1))
            at = offset + 8 * first
            assert answer.word(2) == int.from_bytes(spoilt.raw.raw[at : at + 8], "little")


@pytest.mark.parametrize("length", [8, 16, 40, 4096, 16 * 3 * 32 * 4 + 24])
@pytest.mark.parametrize(("to", "start"), [(0, 0), (8, 0), (0, 8), (13, 13), (3, 9)])
def test_copy_is_exact(cpu: Kernels, length: int, to: int, start: int) -> None:
    source, target = Memory(length + 64), Memory(length + 64)
    content = random.Random(length).randbytes(length + 64)
    ctypes.memmove(source.at, content, length + 64)
    cpu.run("copy", target.at + to, source.at + start, length)
    assert target.raw.raw[to : to + length] == content[start : start + length]
    assert target.raw.raw[:to] == bytes(to)
    assert target.raw.raw[to + length :] == bytes(64 - to)


def test_spread_and_chain(cpu: Kernels) -> None:
    memory, answer = Memory(800), Memory(24)
    cpu.run("spread", memory.at, 100, 0x1234)
    assert {memory.word(index) for index in range(100)} == {0x1234}
    cpu.run("link_chain", memory.at, 50, 16)
    cpu.run("follow_chain", memory.at, 16, 123, answer.at, grid=(1, 1))
    assert answer.word(0) == 123 % 50


def test_sums_of_an_all_reduce(cpu: Kernels) -> None:
    ranks, words = 4, 100
    step = Tag(1, 0, 0, 0).seed - Tag(0, 0, 0, 0).seed
    tags = [Tag(rank, 0, 200, 1) for rank in range(ranks)]
    assert [tag.seed for tag in tags] == [tags[0].seed + rank * step for rank in range(ranks)]
    memory, answer = Memory(8 * words), Memory(24)
    for index in range(words):
        total = sum(tag.word(index) for tag in tags) % (1 << 64)
        ctypes.memmove(memory.at + 8 * index, total.to_bytes(8, "little"), 8)
    arguments = (memory.at, words, tags[0].seed, step, ranks, answer.at)
    cpu.run("compare_sum", *arguments)
    assert answer.word(0) == 0
    memory.raw[8 * 42] = bytes([memory.raw.raw[8 * 42] ^ 1])
    ctypes.memmove(answer.at, b"\0" * 8 + b"\xff" * 8, 16)
    cpu.run("compare_sum", *arguments)
    assert (answer.word(0), answer.word(1)) == (1, 42)


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs pip install -e '.[deep]'"
)
@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_nvrtc_compiles_them(capability: tuple[int, int]) -> None:
    from gpuguard.deep.cuda_driver import compiled
    from gpuguard.deep.port import CudaError

    try:
        image = compiled(*capability)
    except (CudaError, RuntimeError, OSError) as error:
        if "arch" in str(error) or not isinstance(error, CudaError):
            pytest.skip(f"this NVRTC cannot: {error}")
        raise
    assert image.startswith(b"\x7fELF")
    assert all(name.encode() in image for name in kernels.NAMES)
