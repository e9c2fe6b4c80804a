"""Is every ordered pair of the expected cards granted, and are the cards there at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuguard.core.expectation import Expectation, Origin, find, normal_card
from gpuguard.core.facts import Gpu, P2pFacts, P2pPair
from gpuguard.core.findings import Finding, Severity
from gpuguard.core.p2p_reasons import FAILED, NO_DEVICES, NO_DRIVER, REMEDIES

#: Legend of ``nvidia-smi topo -p2p``; what an operator should think of first.
MEANING = {
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "DR": "disabled by a registry key",
    "NS": "not supported",
    "U": "unknown",
}
_ORIGIN = {
    Origin.CONFIGURATION: "by the configuration",
    Origin.ACCEPTED: "as accepted",
    Origin.PCI_BUS: "by the PCI bus",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the driver says, and what it is held against.

    ``on_bus`` maps the PCI bus id of every NVIDIA display device to the kernel driver that
    holds it: None if none does, "" if that was not looked at.
    """

    p2p: P2pFacts
    expected: Expectation  # with the PCI bus already in it
    on_bus: Mapping[str, str | None] = field(default_factory=dict)
    loaded: str = "unknown"  # loaded_identity
    flavour: str | None = None

    @property
    def seen(self) -> tuple[Gpu, ...]:
        """The cards that count: those that the driver sees and nobody excluded."""
        return tuple(g for g in self.p2p.gpus if g.pci_bus_id not in self.expected.exclude)

    @property
    def together(self) -> int:
        """So many cards, from the first on the PCI bus on, are expected to reach each other.

        Excluded ones count where the driver sees them: CUDA shows them, too.
        """
        pairs = self.expected.expected_pairs(self.seen)
        uuids = [g.uuid for g in sorted(self.p2p.gpus, key=lambda g: (g.pci_bus_id, g.index))]
        for number, uuid in enumerate(uuids):
            if any(not {(uuid, known), (known, uuid)} <= pairs for known in uuids[:number]):
                return number
        return len(uuids)

    @property
    def sees_none(self) -> bool:
        """True if the driver answered that it has no card."""
        return self.p2p.source is None and self.p2p.reason == NO_DEVICES

    @property
    def wants_none(self) -> bool:
        """True if the operator says that there is no card, and there is none."""
        nothing = self.p2p.source is None and self.p2p.reason in (NO_DRIVER, NO_DEVICES)
        return nothing and self.expected.number == 0

    @property
    def short(self) -> int:
        """How many expected cards are known to be missing; 0 also if nobody could look."""
        looked = self.p2p.source is not None or self.sees_none
        return self.expected.shortage(self.seen) if looked else 0

    def bad_pairs(self) -> tuple[P2pPair, ...]:
        """Expected pairs that are not OK in both directions of access."""
        expected = self.expected.expected_pairs(self.seen)
        return tuple(
            pair for pair in self.p2p.pairs if (pair.src, pair.dst) in expected and not is_ok(pair)
        )

    def unreported_pairs(self) -> tuple[tuple[str, str], ...]:
        """Expected pairs that nobody said anything about."""
        reported = {(pair.src, pair.dst) for pair in self.p2p.pairs}
        return tuple(sorted(self.expected.expected_pairs(self.seen) - reported))

    def name(self, uuid: str) -> str:
        """A card as people find it again: its PCI bus id."""
        gpu = find(uuid, self.p2p.gpus)
        return (gpu.pci_bus_id or gpu.uuid) if gpu else uuid


def is_ok(pair: P2pPair) -> bool:
    """True if both read and write are granted."""
    return pair.read == pair.write == "OK"


def p2p_healthy(grant: Grant) -> bool | None:
    """True only if every ordered pair of all expected cards is OK; None: nobody answered."""
    if grant.short or grant.p2p.lost:
        return False
    if grant.wants_none:
        return True
    if grant.p2p.source is None:
        return None
    if not grant.seen and grant.expected.number != 0:
        return None
    return not grant.bad_pairs() and not grant.unreported_pairs()


def p2p_findings(grant: Grant) -> Iterator[Finding]:
    """Lost pairs, missing cards, and answers that could not be had."""
    if grant.short:
        yield _missing(grant, grant.short)
    elif grant.wants_none:
        return
    elif grant.p2p.source is None or (not grant.seen and grant.expected.number != 0):
        yield _unknown(grant)
    yield from _unreachable(grant)
    yield from _lost_pairs(grant)


def driver_not_loaded(grant: Grant) -> Iterator[Finding]:
    """Of a host that runs without the driver: nothing, if no card is expected."""
    number = grant.expected.number
    if not number:
        return
    there = [card for card in grant.on_bus if card not in grant.expected.exclude]
    origin = _ORIGIN.get(grant.expected.origin, "")
    yield Finding(
        code="driver-not-loaded",
        severity=Severity.CRITICAL if there else Severity.UNKNOWN,
        subject="driver",
        message=f"no NVIDIA driver is loaded, and {number} cards are expected {origin}"
        + ("" if there else "; none is seen on the PCI bus"),
        remedy=f"{REMEDIES[NO_DRIVER]}; a card that is meant for something else belongs into "
        "p2p.exclude",
        evidence=dict.fromkeys(there, "on the PCI bus"),
    )


def _unknown(grant: Grant) -> Finding:
    reason = grant.p2p.reason or (NO_DEVICES if grant.p2p.source else FAILED)
    return Finding(
        code="p2p-unknown",
        severity=Severity.UNKNOWN,
        subject="p2p",
        message=f"P2P could not be looked at: {grant.p2p.problem or 'there is no card'}",
        remedy=REMEDIES[reason],
        evidence={"reason": reason},
    )


def _missing(grant: Grant, short: int) -> Finding:
    names = [normal_card(card) for card in grant.expected.missing(grant.seen)]
    unseen = [bus_id for bus_id in _unseen(grant) if bus_id not in names]
    which = ", ".join(_with_place(card, grant) for card in names)
    return Finding(
        code="card-missing",
        severity=Severity.CRITICAL,
        subject=names[0] if len(names) == 1 else f"{short} card{'s' if short > 1 else ''}",
        message=(
            f"{grant.expected.number} cards expected {_ORIGIN.get(grant.expected.origin, '')}, "
            f"the driver sees {len(grant.seen)}" + (f"; missing: {which}" if which else "")
        ),
        remedy=_missing_remedy(grant, names or unseen),
        evidence={card: _where_it_is(card, grant) for card in (*names, *unseen)}
        | {name: said for name, said in grant.p2p.lost if name not in grant.on_bus},
    )


def _missing_remedy(grant: Grant, cards: Sequence[str]) -> str:
    drivers = {driver for card in cards if (driver := grant.on_bus.get(_place(card, grant)))} - {
        "nvidia"
    }
    if drivers == {"vfio-pci"}:
        return "it is handed to virtual machines: if it is meant to, list it in p2p.exclude"
    if drivers:
        modules = " and ".join(sorted(drivers))
        return f"keep {modules} away from it (blacklist in /etc/modprobe.d, rebuild the initramfs)"
    return "see dmesg for NVRM and Xid lines of the missing card; it may take a cold start"


def _where_it_is(card: str, grant: Grant) -> str:
    place = _place(card, grant)
    for name, said in grant.p2p.lost:
        if name == place:
            return said
    if place not in grant.on_bus:
        return "not on the PCI bus" if place else "not seen by the driver"
    driver = grant.on_bus[place]
    if driver is None:
        return "on the PCI bus, held by no driver"
    return f"on the PCI bus, held by {driver}" if driver else "on the PCI bus"


def _place(card: str, grant: Grant) -> str:
    """PCI bus id of a card that is not seen; empty if only its UUID is known."""
    return dict(grant.expected.places).get(card, "" if card.startswith("GPU-") else card)


def _with_place(card: str, grant: Grant) -> str:
    place = _place(card, grant)
    return f"{card} ({place})" if place and place != card else card


def _unseen(grant: Grant) -> list[str]:
    seen = {gpu.pci_bus_id for gpu in grant.p2p.gpus}
    return [b for b in grant.on_bus if b not in seen and b not in grant.expected.exclude]


def _unreachable(grant: Grant) -> Iterator[Finding]:
    """Cards that the driver knows of and cannot reach, unless they are counted as missing."""
    if grant.short:
        named = {_place(normal_card(c), grant) for c in grant.expected.missing(grant.seen)}
        lost = [e for e in grant.p2p.lost if e[0] in grant.on_bus and e[0] not in named]
        if not named:
            lost = []
    else:
        lost = list(grant.p2p.lost)
    for name, said in lost:
        yield Finding(
            code="card-unreachable",
            severity=Severity.CRITICAL,
            subject=name,
            message=f"the driver cannot reach this card: {said}",
            remedy="see dmesg for its NVRM and Xid lines; it may take a cold start",
        )


def _lost_pairs(grant: Grant) -> Iterator[Finding]:
    if bad := grant.bad_pairs():
        count = len(grant.expected.expected_pairs(grant.seen))
        tokens = Counter(pair.read if pair.read != "OK" else pair.write for pair in bad)
        words = ", ".join(f"{token}: {MEANING.get(token, 'no known status')}" for token in tokens)
        cause, remedy = _cause(grant, tokens)
        yield Finding(
            code="p2p-lost",
            severity=Severity.CRITICAL,
            subject="p2p",
            message=f"{len(bad)} of {count} expected ordered pairs have no P2P ({words})",
            remedy=remedy,
            evidence={"cause": cause}
            | {f"{grant.name(p.src)} -> {grant.name(p.dst)}": f"read {p.read}, write {p.write}"
               for p in bad},
        )  # fmt: skip
    if grant.p2p.source is not None and (silent := grant.unreported_pairs()):
        yield Finding(
            code="p2p-incomplete",
            severity=Severity.UNKNOWN,
            subject="p2p",
            message=f"nothing was reported about {len(silent)} expected ordered pairs",
            remedy="does nvidia-smi topo -p2p r show a square matrix?",
            evidence={f"{grant.name(a)} -> {grant.name(b)}": "not reported" for a, b in silent},
        )


def _cause(grant: Grant, tokens: Counter[str]) -> tuple[str, str]:
    """Loaded module first, then the platform: what a rebuild cannot change it is not told to."""
    if grant.flavour == "proprietary":
        return "module", "the proprietary flavour cannot be patched: install the open modules"
    if set(tokens) == {"DR"}:
        return (
            "options",
            "a driver option forbids it: see RegistryDwords in /proc/driver/nvidia/params",
        )
    if grant.loaded == "patched":
        return "platform", (
            "the loaded module is patched, so a rebuild changes nothing: look at the platform "
            "(IOMMU, ACS, BAR1, chipset, slots): gpuguard doctor"
        )
    if grant.loaded == "stock":
        return "module", (
            "the loaded module is not one of our builds, which is the usual reason: gpuguard "
            "status tells whether to rebuild or to reboot; look at the platform only after that"
        )
    return "unknown", (
        "first see whether the loaded module is patched (gpuguard status), then look at the "
        "platform (gpuguard doctor)"
    )
