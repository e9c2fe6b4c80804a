"""The deep check as one JSON object; ``verify-deep.schema.json`` describes it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gpuguard.core.deep import DeepJudgement, PairVerdict
from gpuguard.core.deep_facts import CollectiveFacts, DeepCard, DeepFacts
from gpuguard.core.deep_findings import collective_verdict

_GRANT = {True: "ok", False: "refused", None: "unknown"}


def deep_document(facts: DeepFacts, judgement: DeepJudgement) -> dict[str, Any]:
    """Everything that was seen and thought; words of data in hex."""
    pairs = [_pair(pair) for pair in judgement.pairs]
    return {
        "schema": 1,
        "verdict": judgement.verdict.value,
        "healthy": judgement.healthy,
        "virtualised": facts.virtualised,
        "findings": [asdict(finding) for finding in judgement.findings],
        "gpus": [_card(card) for card in facts.cards],
        "spans": [asdict(span) for span in facts.spans],
        "pairs": [pair for pair in pairs if pair["src"] != pair["dst"]],
        "self_tests": [pair for pair in pairs if pair["src"] == pair["dst"]],
        "collective": _collective(facts.collective),
        "workloads": [asdict(workload) for workload in facts.workloads],
    }


def _card(card: DeepCard) -> dict[str, Any]:
    return {
        "index": card.index,
        "uuid": card.uuid,
        "pci_bus_id": card.pci_bus_id,
        "name": card.name,
        "pcie_generation": card.pcie_generation,
        "pcie_width": card.pcie_width,
        "nvlinks": None if card.nvlinks is None else len(card.nvlinks),
    }


def _pair(judged: PairVerdict) -> dict[str, Any]:
    pair = judged.pair
    return {
        "src": pair.src,
        "dst": pair.dst,
        "grant": _GRANT[pair.grant],
        "verified": judged.verified,
        "verdict": judged.verdict.value,
        "reason": judged.reason,
        "link": judged.ceiling.link,
        "ceiling_bytes_per_second": judged.ceiling.bytes_per_second,
        "load_latency_seconds": pair.load_latency_seconds,
        "copy_latency_seconds": pair.copy_latency_seconds,
        "engines": [
            {
                "engine": engine.engine.value,
                "verdict": engine.verdict.value,
                "reason": engine.reason,
                "bytes_per_second": next(
                    (r.bytes_per_second for r in pair.rates if r.engine is engine.engine), None
                ),
                "checks": [
                    {
                        "span": check.span,
                        "mismatches": check.mismatches,
                        "first": check.first,
                        "expected": _hex(check.expected),
                        "found": _hex(check.found),
                        "kind": check.kind,
                        "sample_equal": check.sample_equal,
                    }
                    for check in pair.checks
                    if check.engine is engine.engine
                ],
            }
            for engine in judged.engines
        ],
    }


def _collective(facts: CollectiveFacts | None) -> dict[str, Any] | None:
    if facts is None:
        return None
    runs = {"on": facts.with_p2p, "off": facts.without_p2p}
    both = facts.with_p2p is not None and facts.without_p2p is not None
    return {
        "verdict": collective_verdict(facts.with_p2p, facts.without_p2p)
        if facts.with_p2p is not None and facts.without_p2p is not None
        else None,
        "nccl": facts.version,
        "problem": facts.problem if not both else None,
        **{f"p2p_{word}": None if run is None else asdict(run) for word, run in runs.items()},
    }


def _hex(word: int | None) -> str | None:
    return None if word is None else f"{word:016x}"
