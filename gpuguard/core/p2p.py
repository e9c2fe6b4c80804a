"""Is every ordered pair of the expected cards granted."""

from __future__ import annotations

from collections.abc import Iterator

from gpuguard.core.facts import HostFacts
from gpuguard.core.findings import Finding, Severity
from gpuguard.core.policy import Policy

#: Legend of ``nvidia-smi topo -p2p``; what an operator should think of first.
_MEANING = {
    "CNS": "chipset not supported: the usual answer of an unpatched module",
    "GNS": "GPU not supported: the usual answer of an unpatched module",
    "TNS": "topology not supported",
    "DR": "disabled by a registry key",
    "NS": "not supported",
    "U": "unknown",
}


def expected_gpus(facts: HostFacts, policy: Policy) -> int | None:
    """How many cards there should be: the operator's word, else what the PCI bus shows."""
    if policy.expected_gpus is not None:
        return policy.expected_gpus
    return len(facts.pci_gpus) if facts.pci_gpus else None


def p2p_healthy(facts: HostFacts, policy: Policy) -> bool | None:
    """True only if every ordered pair of all expected cards is OK; None: nobody answered."""
    if facts.p2p.source is None:
        return None
    expected = expected_gpus(facts, policy)
    count = len(facts.p2p.gpus)
    if expected is not None and count < expected:
        return False
    bad = any(pair.read != "OK" or pair.write != "OK" for pair in facts.p2p.pairs)
    return not bad and len(facts.p2p.pairs) == count * (count - 1)


def p2p_findings(facts: HostFacts, policy: Policy) -> Iterator[Finding]:
    """Lost pairs, missing cards, and answers that could not be had."""
    expected = expected_gpus(facts, policy)
    if facts.p2p.source is None:
        if facts.driver.loaded is not None:
            yield Finding(
                code="p2p-unknown",
                severity=Severity.UNKNOWN,
                subject="p2p",
                message=f"P2P could not be looked at: {facts.p2p.problem}",
                remedy="does nvidia-smi answer?",
            )
        return
    if expected is not None and len(facts.p2p.gpus) < expected:
        yield Finding(
            code="card-missing",
            severity=Severity.CRITICAL,
            subject="p2p",
            message=f"{expected} cards expected, the driver sees {len(facts.p2p.gpus)}",
            remedy="see dmesg for NVRM and Xid lines of the missing card",
        )
    yield from _lost_pairs(facts)


def _lost_pairs(facts: HostFacts) -> Iterator[Finding]:
    bad = [pair for pair in facts.p2p.pairs if pair.read != "OK" or pair.write != "OK"]
    count = len(facts.p2p.gpus)
    if bad:
        token = bad[0].read if bad[0].read != "OK" else bad[0].write
        yield Finding(
            code="p2p-lost",
            severity=Severity.CRITICAL,
            subject="p2p",
            message=(
                f"{len(bad)} of {count * (count - 1)} ordered pairs have no P2P "
                f"({token}: {_MEANING.get(token, 'a status this version does not know')})"
            ),
            remedy="see whether the loaded module is patched: gpuguard status",
            evidence={f"{p.src} -> {p.dst}": f"read {p.read}, write {p.write}" for p in bad[:12]},
        )
    elif len(facts.p2p.pairs) != count * (count - 1):
        yield Finding(
            code="p2p-incomplete",
            severity=Severity.UNKNOWN,
            subject="p2p",
            message=f"{len(facts.p2p.pairs)} pairs reported for {count} cards",
            remedy="does nvidia-smi topo -p2p r show a square matrix?",
        )
