"""Move bytes over one ordered pair of cards and compare them where they arrive.

The destination is poisoned first, and compared by a kernel on the destination card: a peer
aperture that mirrors the writer's own memory passes every test that reads back through it.
The source is compared too, before, so that bad memory is not blamed on the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuguard.core.deep_facts import Engine, Span
from gpuguard.core.deep_pattern import WORD, Tag, describe, runs
from gpuguard.deep.port import Cuda, CudaError

_SAMPLE = 4096  # bytes read back by the host at begin, middle and end

#: Takes one line of the protocol: ``emit(kind, key=value, ...)``.
Emit = Callable[..., None]


class SourceWrongError(Exception):
    """The source card does not hold what its own kernel stored."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Two buffers and the way between them: addresses on source and destination card."""

    src: int
    dst: int
    src_at: int
    dst_at: int

    def issuer(self, engine: Engine) -> int:
        """The card that does the work."""
        at_destination = (Engine.COPY_PULL, Engine.KERNEL_LOAD)
        return self.dst if engine in at_destination else self.src


def move(cuda: Cuda, lane: Lane, engine: Engine, span: Span) -> None:
    """Queue the transfer of a span from the source buffer."""
    src, dst = lane.src_at + span.offset, lane.dst_at + span.offset
    if engine is Engine.COPY_PEER:
        cuda.peer_copy(lane.dst, dst, lane.src, src, span.length)
    elif engine.is_kernel:
        cuda.kernel_copy(lane.issuer(engine), dst, src, span.length)
    else:
        cuda.engine_copy(lane.issuer(engine), dst, src, span.length)


def check_spans(cuda: Cuda, lane: Lane, spans: Sequence[Span], emit: Emit) -> None:
    """Every engine over every span; one line for each.

    Raises:
        CudaError: the driver gave up; what came before has been emitted.
        SourceWrongError: the source's own memory is wrong.
    """
    for engine in Engine:
        for number, span in enumerate(spans):
            emit("step", name="check", engine=engine)
            tag = Tag(lane.src, lane.dst, engine.number, number)
            prepare(cuda, lane, span, tag)
            if engine is Engine.KERNEL_STORE:  # stores what it computes: nothing is loaded
                cuda.fill(lane.src, lane.dst_at + span.offset, span.length, tag.seed)
            else:
                move(cuda, lane, engine, span)
            cuda.wait(lane.issuer(engine))
            emit("check", engine=engine, span=number, **compared(cuda, lane, span, tag))


def prepare(cuda: Cuda, lane: Lane, span: Span, tag: Tag) -> None:
    """Poison the destination, fill the source, and compare the source on its own card.

    Raises:
        SourceWrongError: it is wrong there already.
    """
    at = lane.src_at + span.offset
    cuda.spread(lane.dst, lane.dst_at + span.offset, span.length, tag.poison)
    cuda.wait(lane.dst)
    cuda.fill(lane.src, at, span.length, tag.seed)
    cuda.wait(lane.src)
    found = cuda.compare(lane.src, at, span.length, tag.seed)
    if found.mismatches:
        raise SourceWrongError(
            f"{found.mismatches} words on card {lane.src} are wrong before anything was sent"
        )


def compared(cuda: Cuda, lane: Lane, span: Span, tag: Tag) -> dict[str, Any]:
    """What the destination card, and a sample read by the host, say about a span."""
    at = lane.dst_at + span.offset
    result = cuda.compare(lane.dst, at, span.length, tag.seed)
    sample_equal = all(
        cuda.read(lane.dst, at + first * WORD, count * WORD) == tag.words(first, count)
        for first, count in runs(span.length, _SAMPLE)
    )
    answer: dict[str, Any] = {"mismatches": result.mismatches, "sample_equal": sample_equal}
    if result.first is not None and result.found is not None:
        answer |= {
            "first": result.first * WORD,
            "expected": tag.word(result.first),
            "found": result.found,
            "kind_of_fault": describe(result.found, tag, result.first),
        }
    return answer


def open_lane(cuda: Cuda, src: int, dst: int, length: int) -> Lane:
    """Open access both ways and take memory on both cards."""
    if src != dst:
        cuda.enable_access(src, dst)
        cuda.enable_access(dst, src)
    src_at = cuda.allocate(src, length)
    try:
        return Lane(src, dst, src_at, cuda.allocate(dst, length))
    except CudaError:
        cuda.free(src, src_at)
        raise


def close_lane(cuda: Cuda, lane: Lane) -> None:
    """Give the memory back."""
    cuda.free(lane.src, lane.src_at)
    cuda.free(lane.dst, lane.dst_at)
