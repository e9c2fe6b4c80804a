"""``gpuguard rebuild --automatic``: what the units and hooks run."""

from __future__ import annotations

from typing import Any

import typer

from gpuguard.cli.context import Context
from gpuguard.cli.progress import progress_for_terminal
from gpuguard.cli.session import changing, require_root
from gpuguard.cli.steps import outcome_document, say_outcome, say_unready, step_text
from gpuguard.config_file import load_config
from gpuguard.core.plan import Request
from gpuguard.errors import GpuguardError, LockHeldError
from gpuguard.verbs.automatic import Automatic, give_up, run_automatic
from gpuguard.verbs.inspect import make_plan
from gpuguard.verbs.rebuild import Outcome


def run_by_itself(context: Context, *, dry_run: bool) -> None:
    """Do what is due, say what changed, and remember it."""
    if dry_run:
        config = load_config(context.host, context.config_file)
        for step in make_plan(context.host, config, Request(automatic=True)).plan.steps:
            typer.echo(step_text(step))
        return
    require_root(context)
    try:
        run = _run(context)
    except LockHeldError:
        raise  # the file that queued this run stays: it is tried again
    except GpuguardError as error:
        give_up(context.host, error)
        raise
    if context.json:
        context.print_json(_document(run))
    else:
        _say(run)
    raise typer.Exit(run.exit_status)


def _run(context: Context) -> Automatic:
    config = load_config(context.host, context.config_file)
    progress = progress_for_terminal()

    def tell(outcome: Outcome) -> None:
        progress.close()
        if not context.json:
            say_outcome(outcome)

    with changing(context, config.automatic.lock_timeout_seconds):
        try:
            return run_automatic(context.host, config, progress, tell)
        finally:
            progress.close()


def _say(run: Automatic) -> None:
    say_unready(run.outcomes, run.unready)
    for error in run.problems:
        typer.echo(f"gpuguard: {error.message} [{error.code}]", err=True)
        for line in error.hint.splitlines():
            typer.echo(f"  -> {line}", err=True)
    if run.held_back is not None:
        typer.echo(f"a reboot is held back: {run.held_back}")


def _document(run: Automatic) -> dict[str, Any]:
    return {
        "schema": 1,
        "steps": [outcome_document(outcome, run.unready) for outcome in run.outcomes],
        "problems": [
            {"code": error.code, "message": error.message, "hint": error.hint}
            for error in run.problems
        ],
        "reboot": {
            "safe": run.reboot_safe,
            "next": run.next_release,
            "held_back": run.held_back,
        },
    }
