"""Which cards there should be, and between which of them P2P is expected.

The operator's configuration says so, else the last accepted state, else the PCI bus.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations

from gpuguard.core.facts import Gpu

_SLOT = r"(?:[0-9a-f]{1,8}:)?[0-9a-f]{2}:[0-9a-f]{2}"
_BUS_ID = re.compile(rf"{_SLOT}\.[0-7]", re.IGNORECASE)
_ANY_BUS_ID = re.compile(rf"{_SLOT}(?:\.[0-7])?", re.IGNORECASE)  # Xid lines name the slot alone
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class Origin(StrEnum):
    """Who says what is expected."""

    CONFIGURATION = "configuration"
    ACCEPTED = "accepted"  # gpuguard verify --accept
    PCI_BUS = "pci-bus"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a host must offer.

    ``cards`` and ``groups`` name cards by UUID or PCI bus id. With ``groups`` P2P is expected
    within each of them only, with ``pairs`` (UUIDs) between exactly those.
    """

    origin: Origin = Origin.PCI_BUS
    count: int | None = None
    cards: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    pairs: tuple[tuple[str, str], ...] | None = None
    exclude: tuple[str, ...] = ()  # PCI bus ids of cards that are meant for something else
    since: str = ""  # of an accepted state: when
    places: tuple[tuple[str, str], ...] = ()  # UUID -> PCI bus id where it was accepted

    def on_bus(self, pci_gpus: Sequence[str]) -> Expectation:
        """With the cards on the PCI bus, where nobody has said anything else."""
        if self.origin is not Origin.PCI_BUS:
            return self
        cards = tuple(card for card in pci_gpus if card not in self.exclude)
        if not cards:
            return replace(self, origin=Origin.NONE)
        return replace(self, cards=cards, count=len(cards))

    @property
    def number(self) -> int | None:
        """How many cards; None: nobody says."""
        return self.count if self.count is not None else len(self.cards) or None

    def missing(self, seen: Sequence[Gpu]) -> tuple[str, ...]:
        """Expected cards, as they were named, that are not among those seen."""
        return tuple(card for card in self.cards if find(card, seen) is None)

    def shortage(self, seen: Sequence[Gpu]) -> int:
        """How many cards are not there, named or not."""
        return max(len(self.missing(seen)), (self.count or 0) - len(seen))

    def unexpected(self, seen: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Cards that nobody has named; none where only a number is expected."""
        known = [find(card, seen) for card in self.cards]
        return tuple(gpu for gpu in seen if gpu not in known) if self.cards else ()

    def expected_pairs(self, seen: Sequence[Gpu]) -> frozenset[tuple[str, str]]:
        """Ordered pairs, as UUIDs, of the cards that are there."""
        if self.pairs is not None:
            uuids = {gpu.uuid for gpu in seen}
            return frozenset(pair for pair in self.pairs if uuids.issuperset(pair))
        return frozenset(self._permutations(seen))

    def _permutations(self, seen: Sequence[Gpu]) -> Iterator[tuple[str, str]]:
        if self.groups:
            groups: Collection[Collection[str]] = self.groups
        elif self.cards:
            groups = (self.cards,)
        else:
            groups = ([gpu.uuid for gpu in seen],)
        for group in groups:
            there = [gpu.uuid for card in group if (gpu := find(card, seen)) is not None]
            yield from permutations(there, 2)


def find(card: str, seen: Sequence[Gpu]) -> Gpu | None:
    """The card with this UUID or PCI bus id."""
    wanted = normal_card(card)
    return next((gpu for gpu in seen if wanted in (gpu.uuid, gpu.pci_bus_id)), None)


def normal_card(card: str) -> str:
    """A UUID or a PCI bus id as the driver and sysfs write it."""
    if card[:4].upper() == "GPU-":
        return f"GPU-{card[4:].lower()}" if _UUID.fullmatch(card) else card
    return normal_bus_id(card)


def normal_bus_id(bus_id: str) -> str:
    """A PCI address as sysfs writes it: ``0000:01:00.0`` for NVML's ``00000000:01:00.0``."""
    if not _ANY_BUS_ID.fullmatch(bus_id.strip()):
        return bus_id
    *domain, bus, device = bus_id.strip().lower().split(":")
    return f"{int(domain[0] if domain else '0', 16):04x}:{bus}:{device}"


def is_card(card: str) -> bool:
    """True for a UUID or a PCI bus id."""
    return bool(_UUID.fullmatch(card) or _BUS_ID.fullmatch(card))


def is_bus_id(card: str) -> bool:
    """True for a PCI bus id, with or without its domain."""
    return bool(_BUS_ID.fullmatch(card))
