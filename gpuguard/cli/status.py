"""``gpuguard status``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuguard.accepted import read_accepted
from gpuguard.cli.context import Context
from gpuguard.cli.render import status_text
from gpuguard.core.document import status_document
from gpuguard.core.findings import Verdict
from gpuguard.errors import ProbeError, StateError
from gpuguard.verbs.inspect import configured, judge, policy_of

_EXIT_STATUS = {Verdict.OK: 0, Verdict.WARNING: 1, Verdict.CRITICAL: 1, Verdict.UNKNOWN: 3}


def status(
    ctx: typer.Context,
    *,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Also show every module file, and what DKMS says."),
    ] = False,
) -> None:
    """Show what each kernel would load, what is loaded, and whether a reboot is safe.

    Needs no root. Exit status: 0 fine, 1 not healthy, 3 could not be determined.
    """
    context: Context = ctx.obj
    config, trouble = configured(context.host, context.config_file)
    try:
        facts, assessment = judge(
            context.host, config, with_dkms=verbose or context.json, trouble=trouble
        )
    except StateError as error:
        error.exit_status = ProbeError.exit_status  # for a verb that looks it means: unknown
        raise
    if context.json:
        policy = policy_of(config, read_accepted(context.host))
        context.print_json(status_document(facts, assessment, policy))
    else:
        typer.echo(status_text(facts, assessment, verbose=verbose))
    raise typer.Exit(_EXIT_STATUS[assessment.verdict])
