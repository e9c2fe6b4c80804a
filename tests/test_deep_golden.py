"""What real cards said (docs/hardware-runs.md), replayed through what reads it today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuguard.core.deep_facts import DeepFacts, Engine, Span
from gpuguard.core.deep_findings import judge
from gpuguard.deep.collect import Collector
from tests.schema import check_status, check_verify, problems

GOLDEN = Path(__file__).parent / "golden"
CARDS = [f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in range(2)]


def lines(name: str) -> list[str]:
    return (GOLDEN / f"h200-x2-580-deep-{name}.jsonl").read_text().splitlines()


def document(name: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((GOLDEN / f"h200-x2-580-{name}.json").read_text())
    return answer


def collected(*names: str) -> Collector:
    collector = Collector()
    for name in names:
        collector.begin()
        for line in lines(name):
            collector.take(line)
    return collector


def test_two_h200_are_proven() -> None:
    collector = collected("look", "pairs")
    assert collector.ended
    assert [card.uuid for card in collector.chosen(())] == CARDS
    assert collector.todo() == []
    facts = DeepFacts(
        cards=collector.chosen(()),
        spans=(Span(offset=0, length=8 << 20),),
        pairs=tuple(collector.pairs.values()),
    )
    judgement = judge(facts)
    assert judgement.healthy is True
    assert judgement.findings == ()
    for judged in judgement.pairs:
        assert judged.ceiling.link == "18 NVLinks"
        assert judged.ceiling.bytes_per_second == pytest.approx(18 * 26.562e9)
        assert {rate.engine for rate in judged.pair.rates} == set(Engine)


def test_without_the_last_line_the_same_is_no_proof() -> None:
    collector = collected("look")
    collector.begin()
    for line in lines("pairs"):
        if '"pair-end"' in line:
            break
        collector.take(line)
    collector.close("the child ended early", hang=False)
    facts = DeepFacts(
        cards=collector.chosen(()),
        spans=(Span(offset=0, length=8 << 20),),
        pairs=tuple(collector.pairs.values()),
    )
    assert judge(facts).healthy is None


@pytest.mark.parametrize(
    ("mode", "transport"), [("on", "P2P/direct pointer"), ("off", "SHM/direct/direct")]
)
def test_the_transport_is_in_nccl_s_own_log(mode: str, transport: str) -> None:
    collector = collected(f"collective-{mode}")
    assert collector.transports == {transport}
    assert collector.collective["outcome"] == "ok"
    assert collector.collective["version"] == "2.28.3"


def test_what_was_printed_follows_the_schemas() -> None:
    check_status(document("status"))
    check_verify(document("verify"))
    assert problems("doctor", document("doctor")) == []
    for name in ("verify-deep", "verify-deep-one"):
        printed = document(name)
        assert problems("verify", printed) == []
        assert problems("verify-deep", printed["deep"]) == []
    assert document("verify-deep")["proven"] is True
    assert document("verify-deep-one")["proven"] is False
    assert document("verify-deep-one")["deep"]["pairs"] == []


def test_nothing_in_the_captures_names_a_machine() -> None:
    for path in GOLDEN.glob("h200-*"):
        text = path.read_text()
        for part in text.split("GPU-")[1:]:
            assert not part[:1].isalnum() or part.startswith(("00000000-0000-0000-0000", "0", "1"))
