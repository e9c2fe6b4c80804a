"""Checks of display and PCIe link of each card, and of how near the cards are to each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from gpuguard.core.doctor_check import (
    Cause,
    Check,
    conclude,
    not_applicable,
    not_read,
    without_cards,
)
from gpuguard.core.doctor_facts import CardFacts, DoctorFacts, Link, Unread
from gpuguard.core.findings import Severity

_DEVICES = "/sys/bus/pci/devices"
_BUSY_PERCENT = 20  # a card that computes runs its link at full speed


def check_display(facts: DoctorFacts) -> Check:
    """No card shows a screen: the driver's AUTO policy then keeps static BAR1 off (CASES C01)."""
    cards = facts.own_cards()
    if not cards:
        return not_applicable("display", without_cards(facts))
    causes = [cause for card in cards for cause in _display_causes(card)]
    notes = [
        f"{card.bus_id} is the firmware's boot display; no screen is active on it"
        for card in cards
        if card.boot_vga and not _shows_screen(card) and _screen_is_known(card)
    ]
    return conclude("display", "no card shows a screen", causes, notes)


def _shows_screen(card: CardFacts) -> bool:
    return bool(card.connected) or (card.nvml is not None and card.nvml.display_active is True)


def _screen_is_known(card: CardFacts) -> bool:
    return card.nvml is not None and card.nvml.display_active is not None


def _display_causes(card: CardFacts) -> Iterator[Cause]:
    nvml = card.nvml.display_active if card.nvml else None
    evidence = {
        "boot_vga": str(card.boot_vga).lower(),
        "connected": ", ".join(card.connected) or "none known",
        "display_active (NVML)": "unknown" if nvml is None else str(nvml).lower(),
    }
    if _shows_screen(card) or (card.boot_vga and not _screen_is_known(card)):
        what = "a screen is attached" if _shows_screen(card) else "it is the boot display"
        yield Cause(
            code="display-card",
            severity=Severity.WARNING,
            subject=card.bus_id,
            message=f"{what}: the driver may keep static BAR1 off on this card, and pairs with "
            "it carry nothing while the matrix says OK",
            remedy="let another adapter (processor, BMC) show the console; prove the pairs with "
            "gpuguard verify --deep",
            source="NVML" if nvml else f"{_DEVICES}/{card.bus_id}",
            evidence=evidence,
        )
    elif card.boot_vga is None and not _screen_is_known(card):
        place = Unread(f"{_DEVICES}/{card.bus_id}/boot_vga", "neither it nor NVML tells")
        yield not_read(card.bus_id, place, "does nvidia-smi answer?", code="display-unknown")


def check_link(facts: DoctorFacts) -> Check:
    """Every link at full width; and at full speed while its card computes."""
    cards = facts.own_cards()
    if not cards:
        return not_applicable("link", without_cards(facts))
    causes: list[Cause] = []
    notes: list[str] = []
    for card in cards:
        causes += _link_causes(card)
        notes += _link_notes(card)
    links = sorted({_describe(card.link) for card in cards})
    return conclude("link", ", ".join(links), causes, notes)


def _link_causes(card: CardFacts) -> Iterator[Cause]:
    link = card.link
    if link.width is None or link.max_width is None:
        place = Unread(f"{_DEVICES}/{card.bus_id}/current_link_width", "it is not told there")
        yield not_read(
            card.bus_id, place, "a virtual machine hides it: look on the host", code="link-unknown"
        )
        return
    port = card.bridges[-1] if card.bridges else None
    if link.width < link.max_width:
        slot = port.link.max_width if port else None
        narrow_slot = slot is not None and slot <= link.width
        where = f"; the port above ({port.address}) has no more lanes" if port else ""
        yield Cause(
            code="link-width",
            severity=Severity.WARNING,
            subject=card.bus_id,
            message=f"PCIe link x{link.width}, the card can x{link.max_width}"
            + (where if narrow_slot else ""),
            remedy="another slot, or other bifurcation in the firmware"
            if narrow_slot
            else "seat the card and its riser again; see bifurcation in the firmware",
            source=f"{_DEVICES}/{card.bus_id}/current_link_width",
            evidence=_evidence(card),
        )
    if _is_slow(card) and _is_busy(card):
        yield Cause(
            code="link-speed",
            severity=Severity.WARNING,
            subject=card.bus_id,
            message=f"PCIe link at {link.speed:g} GT/s under load, {_top_speed(card):g} possible",
            remedy="seat the card and its riser again; see PCIe generation in the firmware",
            source=f"{_DEVICES}/{card.bus_id}/current_link_speed",
            evidence=_evidence(card),
        )


def _link_notes(card: CardFacts) -> Iterator[str]:
    link = card.link
    top = _top_speed(card)
    if link.max_speed is not None and top is not None and top < link.max_speed:
        yield f"{card.bus_id}: its slot allows {top:g} GT/s, the card could {link.max_speed:g}"
    if _is_slow(card) and not _is_busy(card):
        yield f"{card.bus_id} runs at {link.speed:g} of {top:g} GT/s; idle cards slow down"


def _top_speed(card: CardFacts) -> float | None:
    """What card and port above can do together."""
    port = card.bridges[-1].link.max_speed if card.bridges else None
    known = [speed for speed in (card.link.max_speed, port) if speed is not None]
    return min(known, default=None)


def _is_slow(card: CardFacts) -> bool:
    top = _top_speed(card)
    return card.link.speed is not None and top is not None and card.link.speed < top


def _is_busy(card: CardFacts) -> bool:
    used = card.nvml.utilization_percent if card.nvml else None
    return used is not None and used >= _BUSY_PERCENT


def _describe(link: Link) -> str:
    speed = "?" if link.speed is None else f"{link.speed:g}"
    return f"x{link.width or '?'} at {speed} GT/s"


def _evidence(card: CardFacts) -> dict[str, str]:
    found = {"card": f"{_describe(card.link)}, at most x{card.link.max_width}"}
    for port in card.bridges[-1:]:
        found["port"] = f"{port.address}, at most x{port.link.max_width or '?'}"
    return found


def widest_path(cards: tuple[CardFacts, ...]) -> str | None:
    """The worst distance that PCIe has to bridge, in NCCL's words; None: none, or unknown.

    ``PIX`` one port, ``PXB`` several below one root port, ``PHB`` through the CPU, ``SYS``
    between NUMA nodes. As nccl's ``graph/paths.cc``, which knows no NODE. Cards that reach
    each other by NVLink need no PCIe path.
    """
    if any(not card.root for card in cards):
        return None
    pairs = (pair for pair in combinations(cards, 2) if not _by_nvlink(*pair))
    order = ("PIX", "PXB", "PHB", "SYS")
    return max((_distance(*pair) for pair in pairs), key=order.index, default=None)


def _by_nvlink(one: CardFacts, other: CardFacts) -> bool:
    return one.nvml is not None and other.bus_id in one.nvml.nvlink_peers


def _distance(one: CardFacts, other: CardFacts) -> str:
    if one.numa_node != other.numa_node:
        return "SYS"
    ports = [[bridge.address for bridge in card.bridges] for card in (one, other)]
    shared = [a for a, b in zip(*ports, strict=False) if a == b]
    if one.root != other.root or not shared:
        return "PHB"
    # Below one switch: its upstream port is shared, each card has a downstream port of its own.
    beyond = max(len(path) for path in ports) - len(shared)
    return "PIX" if beyond <= 1 else "PXB"
