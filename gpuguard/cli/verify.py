"""``gpuguard verify``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from gpuguard.accepted import read_accepted
from gpuguard.cli.context import Context
from gpuguard.cli.deep_options import (
    DEFAULT_MIB,
    AllReduce,
    Beside,
    Deep,
    DeepOptions,
    Only,
    Size,
    deep_options,
)
from gpuguard.cli.matrix import matrices_text
from gpuguard.cli.render import coloured, findings_text, table
from gpuguard.core.expectation import Origin
from gpuguard.core.findings import Verdict
from gpuguard.core.p2p import is_ok
from gpuguard.core.verify import Verification, VerifyFacts, refusal
from gpuguard.core.verify import verify as judge
from gpuguard.core.verify_document import verify_document
from gpuguard.errors import ProbeError, StateError, UsageError
from gpuguard.verbs.expected import expectation_of, has_config
from gpuguard.verbs.verify import DEFAULT_TIMEOUT, Accepted, accept, look_at_p2p

if TYPE_CHECKING:
    from gpuguard.config import Config
    from gpuguard.verbs.deep import DeepOutcome

_ORIGIN = {
    Origin.CONFIGURATION: "the configuration says so",
    Origin.ACCEPTED: "as accepted",
    Origin.PCI_BUS: "as on the PCI bus",
    Origin.NONE: "nobody says how many",
}

Keep = Annotated[
    bool, typer.Option("--accept", help="Keep this state as the one to expect from now on.")
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", min=0.1, max=3600,
        help="How long NVML and nvidia-smi may take, each.",
    ),
]  # fmt: skip
Gate = Annotated[
    bool,
    typer.Option(
        "--gate", help="After a boot: wait for the device nodes, and keep the proof of this boot."
    ),
]


def verify(
    ctx: typer.Context,
    *,
    keep: Keep = False,
    timeout: Timeout = DEFAULT_TIMEOUT,
    gate: Gate = False,
    deep: Deep = False,
    size: Size = DEFAULT_MIB,
    gpu: Only = None,
    beside_workloads: Beside = False,
    all_reduce: AllReduce = True,
) -> None:
    """Check P2P over every ordered pair of cards against what is expected.

    NVML and nvidia-smi are asked independently and must agree. Expected is what the
    configuration says (p2p.gpus, groups, expected_gpus), else the accepted state, else every
    card on the PCI bus. Needs no root, --accept does. Exit status: 0 every expected pair is
    OK, 1 looked at and not healthy, 3 could not look.

    A grant is the driver's word. --deep proves it: copy engines and kernels move bytes over
    every ordered pair, and the card at the other end compares them. It needs
    pip install 'gpuguard[deep]', and takes seconds per pair.
    """
    context: Context = ctx.obj
    options = deep_options(
        deep=deep, mib=size, only=gpu, beside=beside_workloads, all_reduce=all_reduce
    )
    if gate:
        from gpuguard.cli.gate import run_gate

        if options is not None or keep:
            raise UsageError("--gate goes with neither --deep nor --accept")
        run_gate(context, timeout)
    config = _config(context)
    facts = _look(context, config, timeout)
    verification = judge(facts)
    outcome = None
    if options is not None:
        outcome = _move_bytes(context, config, options, verification, keep=keep)
        verification = _proven(verification, outcome)
        keep = outcome.accepted
    accepted = accept(context.host, verification) if keep else None
    if accepted is not None and facts.expected.origin is not Origin.CONFIGURATION:
        expected = replace(accepted.expectation, exclude=facts.expected.exclude)
        facts = replace(facts, expected=expected)
        verification = judge(facts)
        if outcome is not None:
            verification = _proven(verification, outcome)
    if context.json:
        document = verify_document(facts, verification)
        if outcome is not None:
            document |= {"proven": outcome.judgement.healthy is True, "deep": outcome.document}
        context.print_json({**document, "accepted_now": accepted is not None})
    else:
        typer.echo(verify_text(facts, verification, accepted, outcome))
    raise typer.Exit(verification.exit_status)


def _proven(verification: Verification, outcome: DeepOutcome) -> Verification:
    from gpuguard.core.deep_proof import proven_by

    return proven_by(verification, outcome.judgement)


def _move_bytes(
    context: Context,
    config: Config | None,
    options: DeepOptions,
    verification: Verification,
    *,
    keep: bool,
) -> DeepOutcome:
    from gpuguard.cli.deep import run_deep
    from gpuguard.core.deep_findings import DEFAULT_REGRESSED_BELOW

    grant = verification.grant
    return run_deep(
        context.host,
        options,
        expected=None if grant.p2p.source is None else grant.expected.expected_pairs(grant.seen),
        accept=keep,
        acceptable=refusal(verification) is None,
        regressed_below=config.p2p.regressed_below if config else DEFAULT_REGRESSED_BELOW,
    )


def verify_text(
    facts: VerifyFacts,
    verification: Verification,
    accepted: Accepted | None = None,
    outcome: DeepOutcome | None = None,
) -> str:
    """Matrix, what was expected and seen, findings."""
    verdict = verification.verdict
    parts = [coloured(f"gpuguard verify: {verdict}", verdict)]
    if verification.grant.p2p.gpus:
        parts.append(matrices_text(facts.answers, verification.grant))
        parts.append(table(list(_card_rows(verification))))
    parts.append(table(list(_summary(facts, verification, outcome))))
    if outcome is not None:
        from gpuguard.cli.deep import deep_text

        parts.append(deep_text(outcome))
    if verification.findings:
        parts.append(findings_text(verification.findings))
    if accepted is not None:
        parts.append("\n".join(_accepted_lines(accepted, verification)))
    return "\n\n".join(parts)


def _look(context: Context, config: Config | None, timeout: float) -> VerifyFacts:
    try:
        expected = expectation_of(config, read_accepted(context.host))
        return look_at_p2p(context.host, expected, timeout=timeout)
    except StateError as error:
        error.exit_status = ProbeError.exit_status  # for a verb that looks it means: unknown
        raise


def _config(context: Context) -> Config | None:
    if not has_config(context.host, context.config_file):
        return None
    from gpuguard.config_file import read_config  # 0.1 s: only for those who have one

    return read_config(context.host, context.config_file)


def _card_rows(verification: Verification) -> Iterator[list[str]]:
    for gpu in verification.grant.p2p.gpus:
        yield [f"GPU{gpu.index}", gpu.pci_bus_id or "-", gpu.uuid, gpu.name]


def _summary(
    facts: VerifyFacts, verification: Verification, outcome: DeepOutcome | None
) -> Iterator[list[str]]:
    grant = verification.grant
    expected = grant.expected.expected_pairs(grant.seen)
    number = "?" if grant.expected.number is None else str(grant.expected.number)
    where = _ORIGIN[grant.expected.origin]
    if grant.expected.since:
        where += f" {grant.expected.since}"
    within = f" within {len(grant.expected.groups)} groups" if grant.expected.groups else ""
    yield ["expected", f"{number} cards, {len(expected)} ordered pairs{within} ({where})"]
    if grant.expected.origin is Origin.PCI_BUS and grant.seen and outcome is None:
        yield ["accepted", "nothing yet: a card that leaves the bus is not missed (--accept)"]
    good = sum(is_ok(p) and (p.src, p.dst) in expected for p in grant.p2p.pairs)
    verdict = Verdict.OK if verification.healthy else Verdict.CRITICAL
    if grant.p2p.source is not None:
        seen = coloured(f"{good} of {len(expected)} expected ordered pairs OK", verdict)
        yield ["seen", f"{len(grant.seen)} cards, {seen}"]
    yield ["asked", "; ".join(_asked(facts))]
    if facts.on_bus:
        count = len(facts.on_bus)
        out = sum(bus_id in grant.expected.exclude for bus_id in facts.on_bus)
        yield ["PCI bus", f"{count} cards" + (f", {out} excluded" if out else "")]
    yield ["module", f"{facts.driver.loaded or 'none'} ({facts.loaded})"]
    yield ["machine", f"virtual ({facts.guest})" if facts.guest else "not virtual"]
    if grant.p2p.source is not None and outcome is None:
        yield ["data path", "not checked: the driver's word only (--deep moves bytes)"]


def _asked(facts: VerifyFacts) -> Iterator[str]:
    used = [name for name, answer in facts.answers.items() if answer.source is not None]
    if used:
        yield "+".join(used)
    for name, answer in facts.answers.items():
        if answer.source is None:
            yield f"{name}: {answer.problem} [{answer.reason}]"
        elif answer.problem:
            yield f"{name}: {answer.problem}"


def _accepted_lines(accepted: Accepted, verification: Verification) -> Iterator[str]:
    yield accepted.line
    for place in dict(accepted.expectation.places).values():
        yield f"  {place}"
    if verification.grant.expected.origin is Origin.CONFIGURATION:
        yield "note: the configuration says what is expected; this is used once it does not"
