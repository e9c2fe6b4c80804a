"""The driver's grant as series: every expected pair is there, good or bad."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations

from gpuguard.core.expectation import Expectation, Origin, normal_card
from gpuguard.core.facts import Gpu, P2pFacts, P2pPair
from gpuguard.core.metrics import Sample, sample, stateset
from gpuguard.core.p2p import Grant
from gpuguard.core.p2p_reasons import FAILED, NO_DEVICES, NO_DRIVER, REMEDIES

CAPABILITIES = ("read", "write")
#: nvmlGpuP2PStatus_t; what this version does not know is "unknown", too.
_STATUS = {"OK": 0, "CNS": 1, "GNS": 2, "TNS": 3, "DR": 4, "NS": 5, "U": 6}
_ORIGINS = {
    Origin.CONFIGURATION: "configured",
    Origin.ACCEPTED: "accepted",
    Origin.PCI_BUS: "bus",
    Origin.NONE: "none",
}
_UNKNOWN = 6
_OK = "OK"


def could_look(grant: Grant) -> bool:
    """Whether the driver answered, or there is nothing that could be asked."""
    if grant.p2p.source is not None:
        return True
    nothing = grant.p2p.reason in (NO_DRIVER, NO_DEVICES)
    return nothing and not grant.expected.number


def unavailable_samples(p2p: P2pFacts, *, looked: bool) -> Iterator[Sample]:
    """Why nobody could look: one series for each reason, always."""
    current = None if looked else (p2p.reason or FAILED)
    for reason in REMEDIES:
        yield sample("gpuguard_p2p_unavailable", reason == current, reason)


def topo_samples(grant: Grant) -> Iterator[Sample]:
    """Cards and pairs; only for a grant where ``could_look``."""
    expected = grant.expected
    for gpu in grant.seen:
        yield sample(
            "gpuguard_gpu_info", 1, gpu.uuid, str(gpu.index), gpu.name, gpu.pci_bus_id or ""
        )
    yield sample("gpuguard_gpus", len(grant.seen))
    yield sample("gpuguard_gpus_expected", expected.number or 0)
    yield from stateset("gpuguard_expectation_origin", _ORIGINS.values(), _ORIGINS[expected.origin])
    wanted = _expected_pairs(expected, grant.seen)
    reported = {(pair.src, pair.dst): pair for pair in grant.p2p.pairs}
    for capability in CAPABILITIES:
        good = 0
        for src, dst in _shown(wanted, grant):
            word = _word(reported.get((src, dst)), capability)
            good += word == _OK and (src, dst) in wanted
            labels = (src, dst, capability)
            yield sample("gpuguard_p2p_pair_ok", word == _OK, *labels)
            yield sample("gpuguard_p2p_pair_status", _STATUS.get(word, _UNKNOWN), *labels)
        yield sample("gpuguard_p2p_pairs", good, capability)
        yield sample("gpuguard_p2p_pairs_expected", pair_count(expected, grant.seen), capability)


def pair_count(expected: Expectation, seen: Iterable[Gpu]) -> int:
    """How many ordered pairs must be granted, those of missing cards included."""
    if expected.pairs is not None:
        return len(expected.pairs)
    if expected.groups:
        return sum(len(group) * (len(group) - 1) for group in expected.groups)
    number = len(tuple(seen)) if expected.number is None else expected.number
    return number * (number - 1)


def _expected_pairs(expected: Expectation, seen: tuple[Gpu, ...]) -> frozenset[tuple[str, str]]:
    """By UUID; of a card that is not there as far as its UUID is known."""
    if expected.pairs is not None:
        return frozenset(expected.pairs)
    known = {gpu.pci_bus_id: gpu.uuid for gpu in seen} | {
        place: uuid for uuid, place in expected.places
    }
    groups = expected.groups or ((expected.cards,) if expected.cards else ())
    if not groups:
        return expected.expected_pairs(seen)
    return frozenset(pair for group in groups for pair in permutations(_uuids(group, known), 2))


def _uuids(cards: Iterable[str], known: Mapping[str, str]) -> Iterator[str]:
    for card in map(normal_card, cards):
        if card.startswith("GPU-"):
            yield card
        elif card in known:
            yield known[card]


def _shown(wanted: frozenset[tuple[str, str]], grant: Grant) -> list[tuple[str, str]]:
    """Expected pairs, in a lasting order; where none is expected, those that are reported."""
    if wanted or grant.expected.number is not None:
        return sorted(wanted)
    return sorted((pair.src, pair.dst) for pair in grant.p2p.pairs)


def _word(pair: P2pPair | None, capability: str) -> str:
    if pair is None:
        return "U"
    return pair.read if capability == "read" else pair.write
