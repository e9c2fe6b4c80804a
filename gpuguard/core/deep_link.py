"""How fast the link between two cards can be at all: the line rate, which no copy can beat.

Only an upper bound is wanted, to tell the impossible from the fast: protocol overhead is not
taken off, and the narrower end decides. Where a link is not known, no ceiling is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuguard.core.deep_facts import DeepCard

#: PCIe generation -> (transfers per second and lane, payload bits per bit on the wire).
#: 8b/10b, then 128b/130b, then FLITs of 256 bytes with 242 of them transaction layer bytes.
_PCIE = {
    1: (2.5e9, 8 / 10),
    2: (5e9, 8 / 10),
    3: (8e9, 128 / 130),
    4: (16e9, 128 / 130),
    5: (32e9, 128 / 130),
    6: (64e9, 242 / 256),
    7: (128e9, 242 / 256),
}


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Bytes per second, one way, that the link can carry at most; None: not known."""

    bytes_per_second: float | None
    link: str  # for people: "PCIe 5.0 x16", "18 NVLinks", "unknown link"


def pcie_bytes_per_second(generation: int, width: int) -> float | None:
    """Line rate of a PCIe link, one way; None for a generation this version does not know."""
    if generation not in _PCIE or width < 1:
        return None
    transfers, encoding = _PCIE[generation]
    return transfers * encoding * width / 8


def ceiling(one: DeepCard, other: DeepCard, *, nvlink: bool | None) -> Ceiling:
    """Ceiling of the link between two cards.

    Args:
        one: a card.
        other: the other card.
        nvlink: does the driver grant NVLink between them; None: it does not say.
    """
    if one.uuid == other.uuid:
        return Ceiling(None, "one card")
    if nvlink is None:
        return Ceiling(None, "unknown link")
    return _nvlink(one, other) if nvlink else _pcie(one, other)


def _pcie(one: DeepCard, other: DeepCard) -> Ceiling:
    ends = [(card.pcie_generation, card.pcie_width) for card in (one, other)]
    rates = [
        pcie_bytes_per_second(generation, width) if generation and width else None
        for generation, width in ends
    ]
    if None in rates:
        return Ceiling(None, "PCIe of unknown speed")
    slower = min((rate, end) for rate, end in zip(rates, ends, strict=True) if rate is not None)
    rate, (generation, width) = slower
    return Ceiling(rate, f"PCIe {generation}.0 x{width}")


def _nvlink(one: DeepCard, other: DeepCard) -> Ceiling:
    sides = []
    for card, peer in ((one, other), (other, one)):
        links = [
            link for link in card.nvlinks or () if link.to_switch or link.remote_bus_id in
            (None, peer.pci_bus_id)
        ]  # fmt: skip
        rates = [link.bytes_per_second for link in links]
        if not rates or None in rates:
            return Ceiling(None, "NVLink of unknown speed")
        sides.append((sum(rate for rate in rates if rate is not None), len(links)))
    rate, count = min(sides)
    return Ceiling(rate, f"{count} NVLinks")
