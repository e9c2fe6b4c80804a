"""The child's work on pairs: check and measure each, one line of the protocol per fact."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from gpuguard.core.deep_facts import Span
from gpuguard.core.expectation import normal_bus_id
from gpuguard.deep.measure import measure
from gpuguard.deep.port import Cuda, CudaCard, CudaError
from gpuguard.deep.transfer import (
    Emit,
    SourceWrongError,
    check_spans,
    close_lane,
    open_lane,
)

#: Errors that say nothing about the link.
_CANNOT_TELL = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "NVRTC"})

UuidPair = tuple[str, str]


def run_pairs(
    cuda: Cuda,
    *,
    wanted: Sequence[UuidPair] | None,
    only: Sequence[str],
    spans: Sequence[Span],
    emit: Emit,
) -> None:
    """Work through pairs until done, or until CUDA fails: its contexts are then unusable.

    Args:
        cuda: the driver.
        wanted: ordered pairs of UUIDs; None: all, or one card with itself.
        only: cards by UUID, PCI bus id or index; empty: all.
        spans: what to send; the longest one is measured.
        emit: takes the lines.
    """
    cards = [
        card
        for card in cuda.cards()
        if not only or is_named(card.uuid, card.ordinal, card.pci_bus_id, only)
    ]
    pairs = [(a, b) for a, b in wanted] if wanted is not None else all_pairs(cards)
    emit(
        "cards",
        cards=[
            {"index": c.ordinal, "uuid": c.uuid, "pci_bus_id": c.pci_bus_id, "name": c.name}
            for c in cards
        ],
        pairs=pairs,
    )
    ordinals = {card.uuid: card.ordinal for card in cards}
    for src, dst in pairs:
        if not _one_pair(cuda, ordinals[src], ordinals[dst], spans, _for_pair(emit, src, dst)):
            return
    emit("end")


def all_pairs(cards: Sequence[CudaCard]) -> list[UuidPair]:
    """Every ordered pair; of a single card itself, as a self-test."""
    uuids = [card.uuid for card in cards]
    return [(uuids[0], uuids[0])] if len(uuids) == 1 else list(permutations(uuids, 2))


def _one_pair(cuda: Cuda, src: int, dst: int, spans: Sequence[Span], emit: Emit) -> bool:
    try:
        emit("step", name="open", engine=None)
        push = src == dst or cuda.can_access(src, dst)
        pull = src == dst or cuda.can_access(dst, src)
        emit("grant", grant=push and pull)
        if push and pull:
            _check_and_measure(cuda, src, dst, spans, emit)
    except CudaError as error:
        emit("failed", problem=str(error), cannot_tell=error.name in _CANNOT_TELL)
        return False
    except SourceWrongError as error:
        emit("failed", problem=str(error), cannot_tell=True)
        return False
    emit("pair-end")
    return True


def _check_and_measure(cuda: Cuda, src: int, dst: int, spans: Sequence[Span], emit: Emit) -> None:
    lane = open_lane(cuda, src, dst, max(span.offset + span.length for span in spans))
    check_spans(cuda, lane, spans, emit)
    longest = max(range(len(spans)), key=lambda number: spans[number].length)
    measure(cuda, lane, spans[longest], longest, emit)
    emit("step", name="close", engine=None)
    close_lane(cuda, lane)


def _for_pair(emit: Emit, src: str, dst: str) -> Emit:
    return lambda kind, **values: emit(kind, pair=(src, dst), **values)


def is_named(uuid: str, index: int, bus_id: str, names: Sequence[str]) -> bool:
    """Does one of the names mean this card: by UUID, index or PCI bus id."""
    own = (uuid, str(index), normal_bus_id(bus_id))
    return any(name in own or normal_bus_id(name) in own for name in names)
