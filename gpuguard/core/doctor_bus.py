"""Checks of the cards as devices: who drives them, and what lies between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpuguard.core.doctor_check import (
    Cause,
    Check,
    conclude,
    not_applicable,
    not_read,
    plural,
    without_cards,
)
from gpuguard.core.doctor_facts import Bridge, CardFacts, DoctorFacts, Unread
from gpuguard.core.findings import Severity

_DEVICES = "/sys/bus/pci/devices"
_GROUPS = "/sys/kernel/iommu_groups"
TRANSLATING = ("DMA", "DMA-FQ")  # types of IOMMU groups
#: ACS Control register, PCI Express Base Specification 7.7.11.3; words as lspci prints them.
_ACS_BITS = (
    (0x01, "SrcValid"), (0x02, "TransBlk"), (0x04, "ReqRedir"), (0x08, "CmpltRedir"),
    (0x10, "UpstreamFwd"), (0x20, "EgressCtrl"), (0x40, "DirectTrans"),
)  # fmt: skip
_REDIRECTING = 0x04 | 0x08 | 0x20
_UPSTREAM = 0x10
_SMALL_BAR1 = 256 << 20  # what a card offers before resizable BAR is used
_MIB = 1 << 20
_NOVA = ("nova", "nova_core", "nova_drm")


def check_cards(facts: DoctorFacts) -> Check:
    """Are there cards at all, and does each have the nvidia driver."""
    if isinstance(facts.cards, Unread):
        return conclude("cards", "", [not_read("cards", facts.cards, code="cards-unknown")])
    cards = facts.own_cards()
    if not facts.cards:
        return conclude("cards", "", [_no_cards()])
    notes = [f"{c.bus_id} is left out by p2p.exclude" for c in facts.cards if c not in cards]
    if len(cards) == 1:
        notes.append("P2P needs two cards")
    causes = [cause for card in cards for cause in _driver_causes(card)]
    return conclude("cards", f"{plural(len(cards), 'card')}, driven by nvidia", causes, notes)


def _no_cards() -> Cause:
    return Cause(
        code="no-cards",
        severity=Severity.CRITICAL,
        subject="cards",
        message="no NVIDIA display device is on the PCI bus",
        remedy="is it seated and powered? in a virtual machine: is it passed through? see lspci",
        source=_DEVICES,
    )


def _driver_causes(card: CardFacts) -> Iterator[Cause]:
    source = f"{_DEVICES}/{card.bus_id}/driver"
    if isinstance(card.driver, Unread):
        yield not_read(card.bus_id, card.driver, code="cards-unknown")
    elif card.driver is None:
        yield Cause(
            code="card-unbound",
            severity=Severity.CRITICAL,
            subject=card.bus_id,
            message="no driver is bound to this card: P2P does without it",
            remedy="modprobe nvidia, then see dmesg for NVRM lines of this card",
            source=source,
        )
    elif card.driver != "nvidia":
        yield Cause(
            code="card-vfio" if card.driver == "vfio-pci" else "card-foreign-driver",
            severity=Severity.CRITICAL,
            subject=card.bus_id,
            message=f"{card.driver} is bound to this card: P2P does without it",
            remedy=_driver_remedy(card.driver),
            source=source,
            evidence={"driver": card.driver},
        )
    if card.excluded_by_driver:
        yield Cause(
            code="card-excluded",
            severity=Severity.CRITICAL,
            subject=card.bus_id,
            message="the driver leaves this card out, by its option NVreg_ExcludedGpus",
            remedy="take it out of NVreg_ExcludedGpus in /etc/modprobe.d, then reload the driver",
            source=f"/proc/driver/nvidia/gpus/{card.bus_id}/information",
        )


def _driver_remedy(driver: str) -> str:
    if driver == "vfio-pci":
        return "meant for a guest: list it in p2p.exclude; else take it out of vfio-pci's ids="
    names = _NOVA if driver in _NOVA else (driver,)
    lines = "; ".join(f"blacklist {name}" for name in names)
    return (
        f"write into /etc/modprobe.d/gpuguard-blacklist.conf the lines: {lines}; "
        "then update-initramfs -u (dracut: dracut --force) and reboot"
    )


def check_iommu(facts: DoctorFacts) -> Check:
    """No card in a translating IOMMU group; decided by type, not by the command line."""
    cards = facts.own_cards()
    if not cards:
        return not_applicable("iommu", without_cards(facts))
    causes = list(_iommu_causes(cards))
    types = {str(card.iommu_type) for card in cards if card.iommu_group is not None}
    fine = f"groups of type {', '.join(sorted(types))}" if types else "no IOMMU groups: it is off"
    return conclude("iommu", fine, causes)


def _iommu_causes(cards: Iterable[CardFacts]) -> Iterator[Cause]:
    unread: set[str] = set()
    for card in cards:
        kind = card.iommu_type
        if isinstance(kind, Unread):
            if kind.place not in unread:
                unread.add(kind.place)
                yield not_read(
                    card.bus_id, kind, "is /sys mounted? run it on the host", code="iommu-unknown"
                )
        elif kind in TRANSLATING:
            yield _translating(card, kind)
        elif kind not in (None, "identity"):
            yield _odd_group(card, str(kind))


def _translating(card: CardFacts, kind: str) -> Cause:
    return Cause(
        code="iommu-translating",
        severity=Severity.CRITICAL,
        subject=card.bus_id,
        message=f"its IOMMU group translates addresses ({kind}): peer writes get lost, "
        "copies can succeed and hold zeros",
        remedy="add iommu=pt to GRUB_CMDLINE_LINUX in /etc/default/grub, update-grub, reboot",
        source=f"{_GROUPS}/{card.iommu_group}/type",
        evidence={"group": str(card.iommu_group), "type": kind},
    )


def _odd_group(card: CardFacts, kind: str) -> Cause:
    # "unmanaged" belongs to a guest (vfio), "blocked" lets no DMA through
    known = kind in ("unmanaged", "blocked")
    return Cause(
        code="iommu-foreign-domain" if known else "iommu-unknown",
        severity=Severity.CRITICAL if known else Severity.UNKNOWN,
        subject=card.bus_id,
        message=f"its IOMMU group is of type {kind}"
        + (": it is a guest's, or lets no DMA through" if known else ", which is not known here"),
        remedy="is the card meant for vfio-pci? list it in p2p.exclude",
        source=f"{_GROUPS}/{card.iommu_group}/type",
        evidence={"type": kind},
    )


def check_acs(facts: DoctorFacts) -> Check:
    """No port above a card sends peer traffic up to the CPU."""
    cards = facts.own_cards()
    if not cards:
        return not_applicable("acs", without_cards(facts))
    if any(isinstance(card.driver, Unread) for card in cards):
        place = Unread(_DEVICES, "sysfs does not show every card")
        return conclude(
            "acs", "", [not_read("bridges", place, "run it on the host", code="acs-unknown")]
        )
    above: dict[str, tuple[Bridge, list[str]]] = {}
    for card in cards:
        for bridge in card.bridges:
            above.setdefault(bridge.address, (bridge, []))[1].append(card.bus_id)
    causes = [_redirecting(b, below) for b, below in above.values() if redirects(b)]
    causes += _acs_unread([bridge for bridge, _ in above.values()])
    notes = [
        f"{address} has UpstreamFwd on, which alone redirects nothing between its own ports"
        for address, (bridge, _) in above.items()
        if isinstance(bridge.acs, int) and bridge.acs & _UPSTREAM and not redirects(bridge)
    ]
    fine = f"no redirect on {plural(len(above), 'port')} above the cards"
    return conclude("acs", fine if above else "no ports above the cards", causes, notes)


def redirects(bridge: Bridge) -> bool:
    """True if peer traffic that reaches this port is sent on to the CPU."""
    return isinstance(bridge.acs, int) and bool(bridge.acs & _REDIRECTING)


def _redirecting(bridge: Bridge, below: list[str]) -> Cause:
    control = bridge.acs if isinstance(bridge.acs, int) else 0
    words = " ".join(f"{name}{'+' if control & bit else '-'}" for bit, name in _ACS_BITS)
    return Cause(
        code="acs-redirect",
        severity=Severity.WARNING,
        subject=bridge.address,
        message="ACS on this port sends peer traffic up to the CPU: P2P is slow, or hangs",
        remedy=f"setpci -s {bridge.address} ECAP_ACS+0x6.w=0000:003c; after every boot again, "
        f"or for good with pci=disable_acs_redir={bridge.address} on the kernel's command line "
        "(guests are then no longer isolated from each other)",
        source=f"{_DEVICES}/{bridge.address}/config",
        evidence={"cards": ", ".join(below), "ACSCtl": f"{control:#06x} {words}"},
    )


def _acs_unread(bridges: list[Bridge]) -> Iterator[Cause]:
    unread = [(b.address, b.acs) for b in bridges if isinstance(b.acs, Unread)]
    if unread:
        address, first = unread[0]
        yield Cause(
            code="acs-unknown",
            severity=Severity.UNKNOWN,
            subject=", ".join(name for name, _ in unread),
            message=f"ACS of {plural(len(unread), 'port')} could not be read: {first.why}",
            remedy="run gpuguard doctor as root; in a virtual machine look on the host",
            source=f"{_DEVICES}/{address}/config",
        )


def check_bar1(facts: DoctorFacts) -> Check:
    """The BAR1 of each card maps all of its memory."""
    cards = facts.own_cards()
    if not cards:
        return not_applicable("bar1", without_cards(facts))
    sizes = sorted({card.bar1_bytes // _MIB for card in cards if isinstance(card.bar1_bytes, int)})
    fine = f"{', '.join(map(str, sizes))} MiB, as large as the memory or larger"
    causes = [cause for card in cards for cause in _bar1_causes(card, facts.nvml_problem)]
    return conclude("bar1", fine, causes)


def _bar1_causes(card: CardFacts, nvml_problem: str | None) -> Iterator[Cause]:
    memory = card.nvml.memory_bytes if card.nvml else None
    source = f"{_DEVICES}/{card.bus_id}/resource"
    size = card.bar1_bytes
    if size is None or isinstance(size, Unread):
        yield not_read(card.bus_id, size or Unread(source, "nothing was read"), code="bar1-unknown")
    elif size == 0:
        yield Cause(
            code="bar1-unassigned",
            severity=Severity.CRITICAL,
            subject=card.bus_id,
            message="BAR1 has no address: firmware and kernel found no room for it",
            remedy="turn on Above 4G Decoding in the firmware; or boot with pci=realloc",
            source=source,
        )
    elif size < memory if memory is not None else size <= _SMALL_BAR1:
        yield _small_bar1(card, size, memory, source)
    elif memory is None:
        place = Unread("the memory size (NVML)", nvml_problem or "NVML does not list this card")
        yield not_read(card.bus_id, place, "does nvidia-smi answer?", code="bar1-unknown")


def _small_bar1(card: CardFacts, size: int, memory: int | None, source: str) -> Cause:
    offers = ""
    if card.bar1_possible is not None and card.bar1_possible > size:
        offers = f" (the card offers {card.bar1_possible // _MIB} MiB)"
    beside = f" of {memory // _MIB} MiB of memory" if memory is not None else ""
    return Cause(
        code="bar1-small",
        severity=Severity.CRITICAL,
        subject=card.bus_id,
        message=f"BAR1 maps {size // _MIB} MiB{beside}: peers cannot reach the rest",
        remedy="turn on Resizable BAR and Above 4G Decoding, and turn off CSM, in the firmware"
        + offers,
        source=source,
        evidence={"bar1_bytes": str(size), "memory_bytes": str(memory) if memory else "unknown"},
    )
