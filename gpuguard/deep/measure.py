"""Bandwidth and latency of one ordered pair, by the issuing card's own clock."""

from __future__ import annotations

from statistics import median

from gpuguard.core.deep_facts import Engine, Span
from gpuguard.core.deep_pattern import WORD, Tag
from gpuguard.deep.port import Cuda
from gpuguard.deep.transfer import Emit, Lane, compared, move, prepare

_ROUNDS = 7
_ROUND_SECONDS = 0.05  # transfers of one round are queued back to back
_MOST_QUEUED = 64
_TAG_SPAN = 15  # no other transfer of the pair has this number
_NODES = 4096
_STRIDES = (WORD, 4096)  # smallest, largest distance of two nodes
_STEPS = 2000
_SMALL = Span(offset=0, length=4096)
_SMALL_QUEUED = 32


def measure(cuda: Cuda, lane: Lane, span: Span, number: int, emit: Emit) -> None:
    """Rates of all engines over one span, then latencies; what arrived is compared again.

    Args:
        cuda: the driver.
        lane: the pair.
        span: what is sent each time.
        number: the span's number, for the comparison.
        emit: takes the lines ``rate``, ``check`` and ``latency``.
    """
    for engine in Engine:
        emit("step", name="measure", engine=engine)
        tag = Tag(lane.src, lane.dst, engine.number, _TAG_SPAN)
        prepare(cuda, lane, span, tag)
        emit("rate", engine=engine, bytes_per_second=_bandwidth(cuda, lane, engine, span))
        emit("check", engine=engine, span=number, **compared(cuda, lane, span, tag))
    emit("step", name="latency", engine=None)
    emit(
        "latency",
        load_latency_seconds=_load_latency(cuda, lane, span),
        copy_latency_seconds=_copy_latency(cuda, lane),
    )


def _bandwidth(cuda: Cuda, lane: Lane, engine: Engine, span: Span) -> float:
    card = lane.issuer(engine)
    first = cuda.timed(card, lambda: move(cuda, lane, engine, span))
    queued = max(1, min(_MOST_QUEUED, int(_ROUND_SECONDS / max(first, 1e-9))))

    def work() -> None:
        for _ in range(queued):
            move(cuda, lane, engine, span)

    seconds = median(cuda.timed(card, work) for _ in range(_ROUNDS))
    return span.length * queued / max(seconds, 1e-9)


def _load_latency(cuda: Cuda, lane: Lane, span: Span) -> float | None:
    """Seconds per load of the destination card from the source's memory; None: chain broken."""
    stride = min(_STRIDES[1], span.length // _NODES // WORD * WORD)
    if stride < _STRIDES[0]:
        return None
    cuda.link_chain(lane.src, lane.src_at, _NODES, stride)
    cuda.wait(lane.src)
    seconds = median(
        cuda.timed(lane.dst, lambda: cuda.follow_chain(lane.dst, lane.src_at, stride, _STEPS))
        for _ in range(_ROUNDS)
    )
    return seconds / _STEPS if cuda.chain_end(lane.dst) == _STEPS % _NODES else None


def _copy_latency(cuda: Cuda, lane: Lane) -> float:
    """Seconds per small copy, issued by the source back to back."""

    def work() -> None:
        for _ in range(_SMALL_QUEUED):
            move(cuda, lane, Engine.COPY_PUSH, _SMALL)

    return median(cuda.timed(lane.src, work) for _ in range(_ROUNDS)) / _SMALL_QUEUED
