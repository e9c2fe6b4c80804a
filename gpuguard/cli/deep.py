"""``gpuguard verify --deep``: its progress, its text."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator

import typer

from gpuguard.cli.deep_options import DeepOptions
from gpuguard.cli.render import coloured, table
from gpuguard.core.deep import DeepVerdict, PairVerdict
from gpuguard.core.deep_facts import CollectiveFacts, Engine
from gpuguard.core.deep_findings import card_name, collective_verdict
from gpuguard.core.findings import Verdict
from gpuguard.deep.course import DeepRequest
from gpuguard.host import Host
from gpuguard.verbs.deep import DeepOutcome, deep_verify

_MIB = 1 << 20
_COPIES = (Engine.COPY_PUSH, Engine.COPY_PULL, Engine.COPY_PEER)
_KERNELS = (Engine.KERNEL_STORE, Engine.KERNEL_LOAD)
_COLOUR = {DeepVerdict.OK: Verdict.OK, DeepVerdict.INCONCLUSIVE: Verdict.UNKNOWN}


def run_deep(
    host: Host,
    options: DeepOptions,
    *,
    expected: Collection[tuple[str, str]] | None,
    accept: bool,
    acceptable: bool,
    regressed_below: float,
) -> DeepOutcome:
    """Run it, with a line that shows the step to whoever watches stderr."""
    request = DeepRequest(
        size_bytes=options.mib * _MIB,
        only=options.only,
        beside_workloads=options.beside,
        collective=options.all_reduce,
    )
    watched = sys.stderr.isatty()
    try:
        return deep_verify(
            host,
            request,
            expected=expected,
            accept=accept,
            acceptable=acceptable,
            regressed_below=regressed_below,
            progress=_show if watched else None,
        )
    finally:
        if watched:
            typer.echo("\r\x1b[2K", nl=False, err=True)


def _show(step: str) -> None:
    typer.echo(f"\r\x1b[2K  {step[:100]}", nl=False, err=True)


def deep_text(outcome: DeepOutcome) -> str:
    """A row for each pair, and what is said about the whole; findings follow the grant's."""
    judgement = outcome.judgement
    verdict = judgement.verdict
    parts = [coloured(f"gpuguard verify --deep: {_word(outcome)}", verdict)]
    if judgement.pairs:
        parts.append(table(list(_pair_rows(outcome))))
    parts.append(table(list(_summary(outcome))))
    return "\n\n".join(parts)


def _word(outcome: DeepOutcome) -> str:
    count = len(outcome.facts.pairs)
    verified = sum(pair.verified for pair in outcome.judgement.pairs if not _is_self(pair))
    if not count:
        return f"{outcome.judgement.verdict}, no pair tested"
    return f"{outcome.judgement.verdict}, {verified} of {count} ordered pairs proven"


def _pair_rows(outcome: DeepOutcome) -> Iterator[list[str]]:
    name = card_name(outcome.facts)
    yield ["from", "to", "grant", "copy", "kernel", "copy GB/s", "kernel GB/s", "load", "link"]
    for judged in outcome.judgement.pairs:
        pair = judged.pair
        yield [
            name(pair.src),
            "itself (no pair)" if _is_self(judged) else name(pair.dst),
            {True: "ok", False: coloured("refused", Verdict.CRITICAL), None: "?"}[pair.grant],
            _mark(judged.of(_COPIES)),
            _mark(judged.of(_KERNELS)),
            _rates(judged, (Engine.COPY_PUSH, Engine.COPY_PULL)),
            _rates(judged, _KERNELS),
            _latency(pair.load_latency_seconds),
            _link(judged),
        ]


def _summary(outcome: DeepOutcome) -> Iterator[list[str]]:
    facts = outcome.facts
    if facts.pairs or facts.self_tests:
        longest = max(span.length for span in facts.spans) // _MIB
        sent = f"{len(facts.spans)} transfers of up to {longest} MiB by each engine"
        yield ["sent", f"{sent}, compared word for word on the destination card"]
        yield ["rates", "GB/s as write, read: issued on the source, on the destination"]
    if facts.collective is not None:
        yield ["all-reduce", _collective(facts.collective)]
    if facts.virtualised is not None:
        yield ["machine", f"virtual ({facts.virtualised})"]
    if facts.workloads:
        yield ["beside", f"{len(facts.workloads)} processes that compute on the cards"]
    if outcome.accepted:
        yield ["accepted", "these bandwidths are the baseline from now on"]
    elif not outcome.asked and outcome.baseline is not None and facts.pairs:
        yield ["baseline", outcome.baseline]
    elif outcome.asked:
        yield ["accepted", "nothing: only what is proven can be accepted"]


def _collective(facts: CollectiveFacts) -> str:
    if facts.with_p2p is None or facts.without_p2p is None:
        return f"not tried: {facts.problem}"
    verdict = collective_verdict(facts.with_p2p, facts.without_p2p)
    runs = (("on", facts.with_p2p), ("off", facts.without_p2p))
    told = ", ".join(f"P2P {word}: {run.outcome} via {run.transport or '?'}" for word, run in runs)
    return f"{verdict} (NCCL {facts.version or '?'}; {told})"


def _mark(verdict: DeepVerdict) -> str:
    return coloured(verdict.value, _COLOUR.get(verdict, Verdict.CRITICAL))


def _rates(judged: PairVerdict, engines: tuple[Engine, ...]) -> str:
    rates = {rate.engine: rate.bytes_per_second for rate in judged.pair.rates}
    if not rates.keys() & set(engines):
        return "-"
    return ", ".join(f"{rates[e] / 1e9:.1f}" if e in rates else "-" for e in engines)


def _latency(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.2f} µs"


def _link(judged: PairVerdict) -> str:
    most = judged.ceiling.bytes_per_second
    return judged.ceiling.link + ("" if most is None else f" ({most / 1e9:.1f} GB/s at most)")


def _is_self(judged: PairVerdict) -> bool:
    return judged.pair.src == judged.pair.dst
