"""Cards, pairs and outcomes for the tests of the deep check."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from gpuguard.core.deep import DeepJudgement, DeepVerdict
from gpuguard.core.deep_facts import Check, DeepCard, DeepFacts, DeepPair, Engine, Rate, Span
from gpuguard.deep.course import DeepRequest
from gpuguard.deep.supervise import Deadlines
from gpuguard.host import LocalHost
from gpuguard.verbs.deep import DeepOutcome, deep_verify
from tests.schema import problems

SPANS = (Span(offset=0, length=4096), Span(offset=13, length=65536))
SIZE = 128 << 10  # words are mixed one by one in Python
QUICK = Deadlines(start=30, look=30, step=2.0, collective=3.0)


def card(index: int, **more: Any) -> DeepCard:
    """A card at the end of a PCIe 5.0 x16 link."""
    return DeepCard(
        index=index,
        uuid=f"GPU-{index}",
        pci_bus_id=f"0000:0{index + 1}:00.0",
        name="RTX",
        **{"pcie_generation": 5, "pcie_width": 16, "nvlinks": (), **more},
    )


def good_pair(src: int, dst: int, gigabytes: float = 14.3, **more: Any) -> DeepPair:
    """A pair over which everything was right."""
    known: dict[str, Any] = {
        "grant": True,
        "nvlink": False,
        "checks": tuple(
            Check(engine=engine, span=span, mismatches=0)
            for engine in Engine
            for span in range(len(SPANS))
        ),
        "rates": tuple(Rate(engine=e, bytes_per_second=gigabytes * 1e9) for e in Engine),
        "load_latency_seconds": 1e-6,
        "copy_latency_seconds": 2e-6,
        "complete": True,
    }
    return DeepPair(src=f"GPU-{src}", dst=f"GPU-{dst}", **{**known, **more})


def facts_of(count: int, pairs: Iterable[DeepPair] = (), **more: Any) -> DeepFacts:
    """All ordered pairs of some cards; those given replace good ones."""
    given = {(pair.src, pair.dst): pair for pair in pairs}
    every = (good_pair(a, b) for a, b in permutations(range(count), 2))
    return DeepFacts(
        cards=tuple(map(card, range(count))),
        spans=SPANS,
        pairs=tuple(given.get((p.src, p.dst), p) for p in every),
        **more,
    )


def verdicts(judgement: DeepJudgement) -> dict[str, DeepVerdict]:
    """``0-1`` -> the pair's verdict."""
    return {
        f"{p.pair.src[4:]}-{p.pair.dst[4:]}": p.verdict
        for p in judgement.pairs
    }  # fmt: skip


def codes(judgement: DeepJudgement) -> list[str]:
    """Codes of the findings, sorted."""
    return sorted(finding.code for finding in judgement.findings)


def look(count: int, **more: Any) -> dict[str, Any]:
    """What the child says of cards without NVLink."""
    cards = [
        {
            "index": n,
            "uuid": f"GPU-{n}",
            "pci_bus_id": f"00000000:0{n + 1}:00.0",
            "name": "Fake",
            "pcie_generation": 5,
            "pcie_width": 16,
            "nvlinks": [],
            "memory_free_bytes": 8 << 30,
        }
        for n in range(count)
    ]
    linked = [[f"GPU-{a}", f"GPU-{b}", False] for a, b in permutations(range(count), 2)]
    return {"problem": None, "cards": cards, "nvlinked": linked, "processes": [], **more}


def fake_child(count: int, faults: Sequence[Mapping[str, Any]] = (), **more: Any) -> list[str]:
    """The command of a child with cards of bytes."""
    options = {"count": count, "faults": list(faults), "look": look(count), **more}
    return [sys.executable, "-m", "tests.deep_fake", json.dumps(options)]


def check_deep(
    root: Path,
    command: Sequence[str],
    *,
    request: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    **more: Any,
) -> DeepOutcome:
    """The verb over a child of one's own; its document is held against the schema."""
    asked = DeepRequest(**{"size_bytes": SIZE, "deadlines": QUICK, **(request or {})})
    outcome = deep_verify(LocalHost(root), asked, command=command, progress=progress, **more)
    assert problems("verify-deep", json.loads(json.dumps(outcome.document))) == []
    return outcome
