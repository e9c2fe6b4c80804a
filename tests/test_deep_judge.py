"""Judging what the bytes have shown: the cases of the field (CASES A, C55) and their twins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuguard.core.deep import DeepVerdict
from gpuguard.core.deep_document import deep_document
from gpuguard.core.deep_facts import (
    Check,
    CollectiveFacts,
    CollectiveOutcome,
    CollectiveRun,
    DeepFacts,
    DeepPair,
    Engine,
    Rate,
)
from gpuguard.core.deep_findings import judge
from gpuguard.core.findings import Verdict
from gpuguard.verbs.deep import DeepOutcome
from tests.deep_kit import codes, facts_of, good_pair, verdicts
from tests.schema import problems


def wrong(src: int, dst: int, kind: str, **more: Any) -> DeepPair:
    """A pair over whose kernels wrong data arrives."""
    bad = Check(
        engine=Engine.KERNEL_STORE, span=0, mismatches=512, first=0, expected=1, found=0, kind=kind
    )
    return good_pair(src, dst, checks=(*good_pair(src, dst).checks, bad), **more)


def test_c01_a_fast_number_is_never_proof() -> None:
    rates = {(0, 1): 128.0, (1, 0): 128.1, (0, 2): 128.0, (2, 0): 122.4}
    facts = facts_of(3, [good_pair(a, b, rate) for (a, b), rate in rates.items()])
    judgement = judge(facts)
    assert judgement.healthy is False
    assert codes(judgement) == ["deep-implausible"]
    for judged in judgement.pairs:
        pair = judged.pair.src[4:], judged.pair.dst[4:]
        assert judged.pair.grant is True
        assert judged.verified is (pair in {("1", "2"), ("2", "1")})
        if not judged.verified:
            assert "above link ceiling" in judged.reason
    document = deep_document(facts, judgement)
    assert document["pairs"][0] | {"grant": "ok", "verified": False} == document["pairs"][0]


@pytest.mark.parametrize("kind", ["zeros", "NaN", "nothing arrived"])
def test_c03_c04_a_copy_that_succeeds_proves_nothing(kind: str) -> None:
    judgement = judge(facts_of(2, [wrong(0, 1, kind)]))
    assert judgement.healthy is False
    assert verdicts(judgement) == {"0-1": DeepVerdict.WRONG_DATA, "1-0": DeepVerdict.OK}
    (finding,) = judgement.findings
    assert finding.code == "deep-wrong-data"
    assert kind in next(iter(finding.evidence.values()))


@pytest.mark.parametrize("missing", ["end", "checks", "one check", "spans"])
def test_c04_without_the_end_marker_nothing_is_proven(missing: str) -> None:
    pair = good_pair(0, 1)
    changes: dict[str, dict[str, Any]] = {
        "end": {"complete": False},
        "checks": {"checks": ()},
        "one check": {"checks": pair.checks[1:]},
        "spans": {},
    }
    facts = facts_of(2, [good_pair(0, 1, **changes[missing])])
    if missing == "spans":
        facts = DeepFacts(cards=facts.cards, pairs=facts.pairs)
    judgement = judge(facts)
    assert judgement.healthy is None
    assert judgement.verdict is Verdict.UNKNOWN
    assert verdicts(judgement)["0-1"] is DeepVerdict.INCONCLUSIVE


def test_c11_one_bad_direction_makes_the_set_unhealthy() -> None:
    refused = good_pair(0, 1, grant=False, checks=(), rates=(), complete=True)
    judgement = judge(facts_of(4, [refused]))
    assert judgement.healthy is False
    assert codes(judgement) == ["deep-no-grant"]
    assert sum(pair.verified for pair in judgement.pairs) == 11


def test_c14_a_round_trip_is_no_proof() -> None:
    """A mirrored aperture: line rate, no error, and the destination's poison is untouched."""
    judgement = judge(facts_of(2, [wrong(0, 1, "nothing arrived", nvlink=False)]))
    assert judgement.healthy is False
    assert "gpuguard doctor" in judgement.findings[0].remedy


def test_c55_a_hang_is_named_with_its_pair_and_engine() -> None:
    hung = good_pair(
        0, 1, checks=tuple(c for c in good_pair(0, 1).checks if not c.engine.is_kernel),
        rates=(), complete=False, hang=True, stopped="kernel-store",
        problem="no answer within 30 s",
    )  # fmt: skip
    judgement = judge(facts_of(3, [hung]))
    assert judgement.healthy is False
    assert codes(judgement) == ["deep-hang"]
    (pair,) = [p for p in judgement.pairs if p.verdict is DeepVerdict.HANG]
    assert [engine.verdict.value for engine in pair.engines] == [
        "ok", "ok", "ok", "hang", "inconclusive",
    ]  # fmt: skip
    assert list(judgement.findings[0].evidence) == [
        "GPU0 (0000:01:00.0) -> GPU1 (0000:02:00.0), kernel-store"
    ]
    assert "NCCL_P2P_DISABLE=1" in judgement.findings[0].remedy


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"hang": True}, DeepVerdict.HANG),
        ({}, DeepVerdict.TRANSFER_ERROR),
        ({"cannot_tell": True}, DeepVerdict.INCONCLUSIVE),
    ],
)
@pytest.mark.parametrize("step", ["open", "copy-push", "latency", "close"])
def test_wherever_it_stops_the_reason_counts(
    changes: dict[str, Any], verdict: DeepVerdict, step: str
) -> None:
    if step == "open":
        changes = {**changes, "checks": (), "rates": ()}
    pair = good_pair(0, 1, complete=False, stopped=step, problem="why", **changes)
    judgement = judge(facts_of(2, [pair]))
    assert verdicts(judgement)["0-1"] is verdict
    assert judgement.healthy is (None if verdict is DeepVerdict.INCONCLUSIVE else False)
    assert "why" in str(judgement.findings[0].evidence)


def test_everything_right_is_healthy() -> None:
    judgement = judge(facts_of(4))
    assert (judgement.healthy, judgement.verdict, judgement.findings) == (True, Verdict.OK, ())


def test_one_card_is_a_self_test_and_no_proof() -> None:
    facts = DeepFacts(
        cards=facts_of(1).cards, spans=facts_of(1).spans, self_tests=(good_pair(0, 0, 2000),)
    )
    judgement = judge(facts)
    assert judgement.healthy is None
    assert judgement.verdict is Verdict.UNKNOWN
    assert codes(judgement) == ["deep-no-pair"]
    broken = DeepFacts(
        cards=facts.cards, spans=facts.spans, self_tests=(wrong(0, 0, "zeros"),)
    )  # fmt: skip
    assert judge(broken).healthy is False


def test_pairs_that_need_not_work_may_be_refused_but_not_wrong() -> None:
    refused = [
        good_pair(a, b, grant=False, checks=(), rates=())
        for a, b in ((0, 2), (2, 0), (1, 2), (2, 1))
    ]
    within = (("GPU-0", "GPU-1"), ("GPU-1", "GPU-0"))
    assert judge(facts_of(3, refused, expected=within)).healthy is True
    assert judge(facts_of(3, refused)).healthy is False
    strange = facts_of(3, [*refused[1:], wrong(0, 2, "zeros")], expected=within)
    assert judge(strange).healthy is False


def test_slower_than_accepted_is_a_warning() -> None:
    baseline = {("GPU-0", "GPU-1", engine): 20e9 for engine in Engine}
    assert judge(facts_of(2), baseline, regressed_below=0.7).findings == ()
    judgement = judge(facts_of(2), baseline, regressed_below=0.8)
    assert codes(judgement) == ["bandwidth-regressed"]
    assert judgement.verdict is Verdict.WARNING
    assert judgement.healthy is True  # the data is right
    assert "72%" in str(judgement.findings[0].evidence)


@given(st.floats(min_value=0) | st.just(float("nan")))
def test_no_rate_above_the_ceiling_is_ever_fine(rate: float) -> None:
    pair = good_pair(0, 1, rates=(Rate(engine=Engine.COPY_PULL, bytes_per_second=rate),))
    verified = judge(facts_of(2, [pair])).pairs[0].verified
    assert verified is (rate <= 32e9 * 16 / 8 * 128 / 130)


OK = CollectiveRun(outcome=CollectiveOutcome.OK, transport="P2P/direct pointer")
SHM = CollectiveRun(outcome=CollectiveOutcome.OK, transport="SHM/direct/direct")


@pytest.mark.parametrize(
    ("on", "off", "code", "healthy"),
    [
        (OK, SHM, None, True),
        ("hang", SHM, "collective-hang", False),
        ("wrong-data", SHM, "collective-wrong-data", False),
        ("error", SHM, "collective-transfer-error", False),
        ("hang", "hang", "collective-inconclusive", None),
        ("wrong-data", "error", "collective-inconclusive", None),
        (SHM, SHM, "collective-inconclusive", None),  # it never used P2P
        (OK, "hang", None, True),  # host memory is not what is asked about
    ],
)
def test_the_all_reduce_blames_p2p_only_against_a_good_run_without(
    on: CollectiveRun | str, off: CollectiveRun | str, code: str | None, healthy: bool | None
) -> None:
    runs = [
        run if isinstance(run, CollectiveRun) else CollectiveRun(outcome=CollectiveOutcome(run))
        for run in (on, off)
    ]
    collective = CollectiveFacts(with_p2p=runs[0], without_p2p=runs[1], version="2.28.9")
    facts = facts_of(2, collective=collective)
    judgement = judge(facts)
    assert codes(judgement) == ([] if code is None else [code])
    assert judgement.healthy is healthy
    document = DeepOutcome(facts=facts, judgement=judgement).document
    assert problems("verify-deep", document) == []


def test_no_nccl_is_said_and_no_failure() -> None:
    judgement = judge(facts_of(2, collective=CollectiveFacts(problem="no libnccl.so.2")))
    assert judgement.healthy is True
    assert judgement.findings == ()
