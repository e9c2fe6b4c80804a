"""``gpuguard verify --gate``: one line for ``systemctl status``, and the proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from gpuguard.accepted import read_accepted
from gpuguard.cli.context import Context
from gpuguard.cli.session import require_root
from gpuguard.core.findings import Verdict
from gpuguard.core.gate import is_open
from gpuguard.core.verify_document import verify_document
from gpuguard.errors import GpuguardError, ProbeError, StateError
from gpuguard.proof import remove_deep_proof, remove_proof
from gpuguard.verbs.expected import expectation_of, has_config
from gpuguard.verbs.gate import Passage, pass_gate, record_result

if TYPE_CHECKING:
    from gpuguard.config import Config

DEFAULT_WAIT = 60.0  # as config.GateConfig has it, for hosts without a configuration


def run_gate(context: Context, timeout: float) -> None:
    """Look, say one line, exit with 0 only if everything expected is proven."""
    require_root(context)
    remove_proof(context.host)  # before the configuration is read: that, too, can fail
    try:
        passage = _pass(context, timeout)
    except GpuguardError as error:
        remove_deep_proof(context.host)
        record_result(context.host, Verdict.UNKNOWN, f"gate shut: {error.message} [{error.code}]")
        if isinstance(error, StateError):
            error.exit_status = ProbeError.exit_status  # for a verb that looks it means: unknown
        raise
    opens = is_open(passage.verification)
    if context.json:
        document = verify_document(passage.facts, passage.verification)
        word = "open" if opens else "shut"
        context.print_json({**document, "accepted_now": False, "gate": word})
    else:
        typer.echo(f"gpuguard: {passage.line}", err=not opens)
    for note in passage.notes:
        typer.echo(f"gpuguard: {note}", err=True)
    raise typer.Exit(passage.verification.exit_status)


def _pass(context: Context, timeout: float) -> Passage:
    config = _config(context)
    return pass_gate(
        context.host,
        expectation_of(config, read_accepted(context.host)),
        wait=config.gate.wait_seconds if config is not None else DEFAULT_WAIT,
        timeout=timeout,
    )


def _config(context: Context) -> Config | None:
    if not has_config(context.host, context.config_file):
        return None
    from gpuguard.config_file import read_config

    return read_config(context.host, context.config_file)
