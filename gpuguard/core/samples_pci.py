"""What is between the cards, as series: BAR1, ACS, IOMMU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpuguard.core.doctor_bus import TRANSLATING, redirects
from gpuguard.core.doctor_facts import CardFacts, Unread
from gpuguard.core.metrics import Sample, sample


def pci_samples(cards: Sequence[CardFacts], uuids: Mapping[str, str]) -> Iterator[Sample]:
    """What could be read; a sum of which a part could not is not there.

    Args:
        cards: those that count.
        uuids: by PCI address, of cards that the driver sees.
    """
    for card in cards:
        if card.bus_id in uuids and isinstance(card.bar1_bytes, int):
            yield sample("gpuguard_gpu_bar1_bytes", card.bar1_bytes, uuids[card.bus_id])
    bridges = {bridge.address: bridge for card in cards for bridge in card.bridges}.values()
    if not any(isinstance(bridge.acs, Unread) for bridge in bridges):
        yield sample("gpuguard_pci_acs_redirecting_bridges", sum(map(redirects, bridges)))
    types = [card.iommu_type for card in cards]
    if not any(isinstance(kind, Unread) for kind in types):
        yield sample("gpuguard_iommu_translating", any(kind in TRANSLATING for kind in types))
