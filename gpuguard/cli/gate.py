"""``gpuguard verify --gate``: one line for ``systemctl status``, and the proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from gpuguard.accepted import read_accepted
from gpuguard.cli.context import Context
from gpuguard.cli.session import require_root
from gpuguard.core.findings import Severity
from gpuguard.core.verify import Verification
from gpuguard.core.verify_document import verify_document
from gpuguard.errors import ProbeError, StateError
from gpuguard.proof import remove_proof
from gpuguard.verbs.expected import expectation_of, has_config
from gpuguard.verbs.gate import Passage, pass_gate

if TYPE_CHECKING:
    from gpuguard.config import Config

DEFAULT_WAIT = 60.0  # as config.GateConfig has it, for hosts without a configuration
_ORDER = (Severity.CRITICAL, Severity.UNKNOWN, Severity.WARNING)


def run_gate(context: Context, timeout: float) -> None:
    """Look, say one line, exit with 0 only if everything expected is proven."""
    require_root(context)
    remove_proof(context.host)  # before the configuration is read: that, too, can fail
    config = _config(context)
    try:
        passage = pass_gate(
            context.host,
            expectation_of(config, read_accepted(context.host)),
            wait=config.gate.wait_seconds if config is not None else DEFAULT_WAIT,
            timeout=timeout,
        )
    except StateError as error:
        error.exit_status = ProbeError.exit_status  # for a verb that looks it means: unknown
        raise
    is_open = passage.verification.exit_status == 0
    if context.json:
        document = verify_document(passage.facts, passage.verification)
        context.print_json({**document, "gate": "open" if is_open else "shut"})
    else:
        typer.echo(gate_line(passage), err=not is_open)
    for note in passage.notes:
        typer.echo(f"gpuguard: {note}", err=True)
    raise typer.Exit(passage.verification.exit_status)


def gate_line(passage: Passage) -> str:
    """One sentence: what was proven, or what is wrong and what to do."""
    verification = passage.verification
    grant = verification.grant
    if verification.exit_status == 0:
        pairs = len(grant.expected.expected_pairs(grant.seen))
        driver = passage.facts.driver.loaded
        module = f"module {driver} {passage.facts.loaded}" if driver else "no driver is loaded"
        by = f" by {'+'.join(verification.sources)}" if verification.sources else ""
        line = f"{len(grant.seen)} cards, all {pairs} ordered pairs granted{by}, {module}"
        return f"gpuguard: gate open: {line}{_others(verification, shown=0)}"
    worst = min(verification.findings, key=lambda finding: _ORDER.index(finding.severity))
    nodes = "" if passage.nodes else " (device nodes did not come in time)"
    what = f"{worst.message}{nodes}; {worst.remedy} [{worst.code}]"
    return f"gpuguard: gate shut: {what}{_others(verification, shown=1)}"


def _others(verification: Verification, *, shown: int) -> str:
    more = len(verification.findings) - shown
    return f"; {more} more: gpuguard verify" if more > 0 else ""


def _config(context: Context) -> Config | None:
    if not has_config(context.host, context.config_file):
        return None
    from gpuguard.config_file import read_config

    return read_config(context.host, context.config_file)
