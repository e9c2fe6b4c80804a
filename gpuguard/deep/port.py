"""What the deep check asks of CUDA: a thin port, so that its logic runs without a card.

Operations are queued on the card that issues them; ``wait`` waits for one card. An address is
a pointer valid on every card that has access to its owner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class CudaError(Exception):
    """A call of the driver failed.

    Args:
        name: the driver's own word: ``CUDA_ERROR_ILLEGAL_ADDRESS``.
        text: the driver's sentence.
        call: what was called.
    """

    def __init__(self, name: str, text: str, call: str) -> None:
        super().__init__(f"{call}: {name} ({text})")
        self.name = name


@dataclass(frozen=True, slots=True)
class CudaCard:
    """A card in CUDA's count (PCI order)."""

    ordinal: int
    uuid: str
    pci_bus_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a card found in its own memory; ``first`` is a word's index, None if all is right."""

    mismatches: int
    first: int | None
    found: int | None


class Cuda(Protocol):
    """A driver with its cards. Every method raises ``CudaError``."""

    def cards(self) -> tuple[CudaCard, ...]:
        """All cards, in PCI order."""

    def can_access(self, accessor: int, owner: int) -> bool:
        """Does the driver grant one card access to another's memory."""

    def enable_access(self, accessor: int, owner: int) -> None:
        """Open that access; again is fine."""

    def allocate(self, card: int, length: int) -> int:
        """Address of new memory on a card."""

    def free(self, card: int, address: int) -> None:
        """Give it back."""

    def wait(self, card: int) -> None:
        """Until everything queued on a card is done."""

    def fill(self, card: int, address: int, length: int, seed: int) -> None:
        """A kernel on the card stores word ``i`` = ``mix(seed + i)``, wherever the address is."""

    def spread(self, card: int, address: int, length: int, word: int) -> None:
        """A kernel on the card stores one word all over."""

    def kernel_copy(self, card: int, dst: int, src: int, length: int) -> None:
        """A kernel on the card loads and stores."""

    def engine_copy(self, card: int, dst: int, src: int, length: int) -> None:
        """A copy engine, issued on the card: ``cuMemcpyDtoDAsync``."""

    def peer_copy(self, dst_card: int, dst: int, src_card: int, src: int, length: int) -> None:
        """``cuMemcpyPeerAsync``, issued on the source."""

    def compare(self, card: int, address: int, length: int, seed: int) -> Comparison:
        """A kernel on the card compares with ``fill``'s words; waits for the answer."""

    def read(self, card: int, address: int, length: int) -> bytes:
        """Copy to the host."""

    def link_chain(self, card: int, address: int, nodes: int, stride: int) -> None:
        """A kernel makes a chain of nodes, each holding the number of the next."""

    def follow_chain(self, card: int, address: int, stride: int, steps: int) -> None:
        """A kernel follows it, each load waiting for the one before."""

    def chain_end(self, card: int) -> int:
        """Waits for ``follow_chain``: the number of the node it ended at."""

    def timed(self, card: int, work: Callable[[], None]) -> float:
        """Seconds that work queued on a card took, by the card's own clock."""
