"""What is sent: small and large, aligned and not."""

from __future__ import annotations

from collections.abc import Iterable

from gpuguard.core.deep_facts import DeepCard, Span

_PAGE = 4096
_LARGE_PAGE = 2 << 20
_MIDDLE = 64 << 20
_OWN_NEED = 1 << 30  # context, modules, NCCL's buffers
SMALLEST = 128 << 10


def make_spans(size: int) -> tuple[Span, ...]:
    """Transfers up to ``size`` bytes; the odd one lies across a large page's border."""
    size = max(size // _PAGE * _PAGE, SMALLEST)
    border = _LARGE_PAGE if size > 2 * _LARGE_PAGE else size // 2
    spans = [
        Span(offset=0, length=_PAGE),
        Span(offset=border - 8 * _PAGE + 13, length=16 * _PAGE),
    ]
    if size > _MIDDLE + _LARGE_PAGE:
        spans.append(Span(offset=_LARGE_PAGE, length=_MIDDLE))
    return (*spans, Span(offset=0, length=size))


def fitting(size: int, cards: Iterable[DeepCard]) -> int:
    """As much of ``size`` as all cards have free, with room for CUDA itself."""
    free = [card.memory_free_bytes for card in cards if card.memory_free_bytes is not None]
    room = (min(free) - _OWN_NEED) // 2 if free else size
    return max(min(size, room), SMALLEST)
