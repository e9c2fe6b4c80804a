"""The answer of ``verify`` as one object, schema 1 (resources/schema/verify.schema.json)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gpuguard.core.document import p2p_document
from gpuguard.core.verify import Verification, VerifyFacts

SCHEMA = 1


def verify_document(facts: VerifyFacts, verification: Verification) -> dict[str, Any]:
    """Everything that ``verify`` found out and thinks of it."""
    grant = verification.grant
    expected = grant.expected.expected_pairs(grant.seen)
    p2p = p2p_document(
        grant.p2p,
        healthy=verification.healthy,
        expected=grant.expected.number,
        sources=verification.sources,
    )
    for pair in p2p["pairs"]:
        pair["expected"] = (pair["src"], pair["dst"]) in expected
    return {
        "schema": SCHEMA,
        "verdict": verification.verdict.value,
        "findings": [
            {**asdict(finding), "severity": finding.severity.value}
            for finding in verification.findings
        ],
        "p2p": p2p,
        "sources": [
            {
                "name": name,
                "answered": answer.source is not None,
                "reason": answer.reason,
                "problem": answer.problem,
                "lost": [{"card": card, "problem": said} for card, said in answer.lost],
                "pairs": [asdict(pair) for pair in answer.pairs],
            }
            for name, answer in facts.answers.items()
        ],
        "expectation": _expectation(verification),
        "pci": [
            {
                "pci_bus_id": bus_id,
                "driver": driver,
                "seen": any(gpu.pci_bus_id == bus_id for gpu in grant.p2p.gpus),
                "excluded": bus_id in grant.expected.exclude,
            }
            for bus_id, driver in facts.on_bus.items()
        ],
        "driver": {
            "userland": facts.driver.userland,
            "loaded": facts.driver.loaded,
            "loaded_identity": facts.loaded,
            "flavour": facts.driver.flavour,
        },
        "virtual_machine": facts.guest,
        "proven": False,  # a grant is not a proof: see verify --deep
    }


def _expectation(verification: Verification) -> dict[str, Any]:
    grant = verification.grant
    expected = grant.expected
    return {
        "source": expected.origin.value,
        "gpus": expected.number,
        "pairs": len(expected.expected_pairs(grant.seen)),
        "cards": list(expected.cards),
        "groups": [list(group) for group in expected.groups],
        "exclude": list(expected.exclude),
        "missing": list(expected.missing(grant.seen)),
        "accepted": expected.since or None,
    }
