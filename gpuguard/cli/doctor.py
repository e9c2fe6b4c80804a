"""``gpuguard doctor``."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from gpuguard.cli.context import Context
from gpuguard.cli.render import coloured, findings_text, table
from gpuguard.config_file import read_config
from gpuguard.core.doctor import Diagnosis, doctor_document
from gpuguard.core.doctor_check import Check, CheckState
from gpuguard.core.findings import Finding, Verdict
from gpuguard.errors import ProbeError, StateError
from gpuguard.verbs.doctor import examine

_MARKS = {
    CheckState.OK: ("ok", Verdict.OK),
    CheckState.PROBLEM: ("PROBLEM", Verdict.CRITICAL),
    CheckState.UNKNOWN: ("unknown", Verdict.UNKNOWN),
}


def doctor(ctx: typer.Context) -> None:
    """Say why there is no (good) P2P: every known cause checked, each with a remedy.

    Nothing is changed. As an ordinary user some places cannot be read; those checks are
    "unknown". Exit status: 0 nothing wrong, 1 problems, 3 only unknowns are in the way.
    """
    context: Context = ctx.obj
    config = read_config(context.host, context.config_file)
    try:
        diagnosis = examine(context.host, config)
    except StateError as error:
        error.exit_status = ProbeError.exit_status  # for a verb that looks it means: unknown
        raise
    if context.json:
        context.print_json(doctor_document(diagnosis))
    else:
        typer.echo(doctor_text(diagnosis))
    raise typer.Exit(diagnosis.exit_status)


def doctor_text(diagnosis: Diagnosis) -> str:
    """A list with a mark for each check, then the findings, worst first."""
    parts = [
        coloured(f"gpuguard doctor: {diagnosis.verdict}", diagnosis.verdict),
        table([row for check in diagnosis.checks for row in _rows(check)]),
    ]
    if diagnosis.causes:
        parts.append(findings_text(_with_source(diagnosis)))
    return "\n\n".join(parts)


def _rows(check: Check) -> Iterator[list[str]]:
    word, colour = _MARKS.get(check.state, ("-", None))
    mark = coloured(word, colour) if colour is not None else word
    yield [mark, check.name, check.summary]
    for note in check.notes:
        yield ["", "", f"note: {note}"]


def _with_source(diagnosis: Diagnosis) -> Iterator[Finding]:
    """Findings as ``status`` shows them, the source as their first piece of evidence."""
    for cause in diagnosis.causes:
        yield Finding(
            code=cause.code,
            severity=cause.severity,
            subject=cause.subject,
            message=cause.message,
            remedy=cause.remedy,
            evidence={"source": cause.source, **cause.evidence},
        )
