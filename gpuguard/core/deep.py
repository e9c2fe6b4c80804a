"""What the bytes prove: a verdict for each engine of each ordered pair, and what to do.

The driver's grant and the data are separate facts: a pair can be granted and not verified. A
fast number is never proof, and neither is the absence of an error: a pair is good only when
every transfer that was planned has been compared and the child has said that it is through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuguard.core.deep_facts import DeepCard, DeepFacts, DeepPair, Engine
from gpuguard.core.deep_link import Ceiling, ceiling
from gpuguard.core.findings import Finding, Verdict, verdict_of


class DeepVerdict(StrEnum):
    """What one engine, or a pair as a whole, has shown; in order of weight."""

    OK = "ok"
    INCONCLUSIVE = "inconclusive"
    IMPLAUSIBLE = "implausible"  # faster than the link can be
    TRANSFER_ERROR = "transfer-error"  # CUDA gave up loudly
    HANG = "hang"
    WRONG_DATA = "wrong-data"


_RANK = tuple(DeepVerdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVerdict:
    """One engine over one pair, with the reason in words."""

    engine: Engine
    verdict: DeepVerdict
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVerdict:
    """One ordered pair. ``verified`` is about bytes only; ``pair.grant`` is the driver's word."""

    pair: DeepPair
    ceiling: Ceiling
    engines: tuple[EngineVerdict, ...]
    verdict: DeepVerdict
    reason: str = ""
    regressed: tuple[tuple[Engine, float], ...] = ()  # share of the baseline that is left

    @property
    def verified(self) -> bool:
        """Every byte was right, and nothing was too good to be true."""
        return self.verdict is DeepVerdict.OK

    def of(self, engines: Iterable[Engine]) -> DeepVerdict:
        """The worst verdict among some engines."""
        wanted = set(engines)
        return worst(e.verdict for e in self.engines if e.engine in wanted)


#: (source UUID, destination UUID, engine) -> bytes per second that were good once.
Baseline = Mapping[tuple[str, str, Engine], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepJudgement:
    """The whole: pairs in order, findings, and ``healthy`` (None: could not be told)."""

    pairs: tuple[PairVerdict, ...]
    findings: tuple[Finding, ...]
    verdict: Verdict
    healthy: bool | None


def worst(verdicts: Iterable[DeepVerdict]) -> DeepVerdict:
    """The gravest of some verdicts; of none: inconclusive."""
    return max(verdicts, key=_RANK.index, default=DeepVerdict.INCONCLUSIVE)


def judge_pairs(
    facts: DeepFacts, baseline: Baseline, regressed_below: float
) -> tuple[PairVerdict, ...]:
    """Verdicts of all pairs, or of the self-test where there is no pair."""
    cards = {card.uuid: card for card in facts.cards}
    return tuple(
        _judge_pair(pair, facts, cards, baseline, regressed_below)
        for pair in (*facts.pairs, *facts.self_tests)
    )


def conclude(
    facts: DeepFacts, pairs: tuple[PairVerdict, ...], findings: Iterable[Finding]
) -> DeepJudgement:
    """Healthy needs every expected ordered pair, and at least one of them."""
    listed = tuple(findings)
    verdict = verdict_of(listed)
    real = [p for p in pairs if p.pair.src != p.pair.dst and facts.expects(p.pair)]
    healthy: bool | None = None
    if verdict is Verdict.CRITICAL:
        healthy = False
    elif verdict is not Verdict.UNKNOWN and real and all(p.verified for p in real):
        healthy = True
    return DeepJudgement(pairs=pairs, findings=listed, verdict=verdict, healthy=healthy)


def _judge_pair(
    pair: DeepPair,
    facts: DeepFacts,
    cards: Mapping[str, DeepCard],
    baseline: Baseline,
    regressed_below: float,
) -> PairVerdict:
    limit = Ceiling(None, "unknown link")
    if pair.src in cards and pair.dst in cards:
        limit = ceiling(cards[pair.src], cards[pair.dst], nvlink=pair.nvlink)
    engines = tuple(_judge_engine(pair, engine, len(facts.spans), limit) for engine in Engine)
    verdict = worst(engine.verdict for engine in engines)
    reasons = [e.reason for e in engines if e.verdict is verdict and e.reason]
    if verdict is DeepVerdict.OK and not pair.complete:
        verdict, reason = _stopped(pair) if pair.stopped else (DeepVerdict.INCONCLUSIVE, "")
        reasons = [reason or "it did not come to its end"]
    return PairVerdict(
        pair=pair,
        ceiling=limit,
        engines=engines,
        verdict=verdict,
        reason=reasons[0] if reasons else "",
        regressed=tuple(_regressed(pair, baseline, regressed_below)),
    )


def _judge_engine(pair: DeepPair, engine: Engine, spans: int, limit: Ceiling) -> EngineVerdict:
    verdict, reason = _engine_verdict(pair, engine, spans, limit)
    return EngineVerdict(engine=engine, verdict=verdict, reason=reason)


def _engine_verdict(
    pair: DeepPair, engine: Engine, spans: int, limit: Ceiling
) -> tuple[DeepVerdict, str]:
    checks = [check for check in pair.checks if check.engine is engine]
    for check in checks:
        if check.mismatches or not check.sample_equal:
            return DeepVerdict.WRONG_DATA, _wrong(check.mismatches, check.first, check.kind)
    if pair.stopped == engine:
        return _stopped(pair)
    for rate in pair.rates:
        if rate.engine is engine and _is_impossible(rate.bytes_per_second, limit):
            return DeepVerdict.IMPLAUSIBLE, _too_fast(rate.bytes_per_second, limit)
    if spans and {check.span for check in checks} == set(range(spans)):
        return DeepVerdict.OK, ""
    return _untried(pair, begun=bool(checks))


def _untried(pair: DeepPair, *, begun: bool) -> tuple[DeepVerdict, str]:
    if pair.grant is False:
        return DeepVerdict.INCONCLUSIVE, "the driver grants no access"
    if pair.stopped is not None and not begun and pair.stopped not in tuple(Engine):
        return _stopped(pair)  # before the first transfer
    return DeepVerdict.INCONCLUSIVE, pair.problem or "not tried"


def _stopped(pair: DeepPair) -> tuple[DeepVerdict, str]:
    if pair.hang:
        return DeepVerdict.HANG, pair.problem or "no answer in time"
    if pair.cannot_tell:
        return DeepVerdict.INCONCLUSIVE, pair.problem or "could not be told"
    return DeepVerdict.TRANSFER_ERROR, pair.problem or "it ended early"


def _wrong(mismatches: int, first: int | None, kind: str) -> str:
    if not mismatches:
        return "the host reads other bytes than the card compared"
    return f"{mismatches} words are wrong, the first at byte {first}: {kind}"


def _is_impossible(bytes_per_second: float, limit: Ceiling) -> bool:
    # Written so that NaN is impossible too.
    return limit.bytes_per_second is not None and not bytes_per_second <= limit.bytes_per_second


def _too_fast(bytes_per_second: float, limit: Ceiling) -> str:
    most = (limit.bytes_per_second or 0) / 1e9
    return f"{bytes_per_second / 1e9:.1f} GB/s is above link ceiling ({limit.link}: {most:.1f})"


def _regressed(pair: DeepPair, baseline: Baseline, below: float) -> Iterator[tuple[Engine, float]]:
    for rate in pair.rates:
        good = baseline.get((pair.src, pair.dst, rate.engine))
        if good and rate.bytes_per_second < below * good:
            yield rate.engine, rate.bytes_per_second / good
