"""``gpuguard rebuild --automatic``: what the units and hooks run."""

from __future__ import annotations

import os
from typing import Any

import typer

from gpuguard.cli.context import Context
from gpuguard.cli.progress import progress_for_terminal
from gpuguard.cli.session import changing, require_root
from gpuguard.cli.steps import outcome_document, say_outcome, say_unready, step_text
from gpuguard.config_file import load_config
from gpuguard.core.plan import Leave, Rebuild, Request
from gpuguard.errors import GpuguardError, LockHeldError, unwritable
from gpuguard.host.notify import journal
from gpuguard.verbs.automatic import ACTIONS, Automatic, give_up, run_automatic
from gpuguard.verbs.inspect import make_plan
from gpuguard.verbs.rebuild import Outcome

#: Set by systemd where stderr is the journal (systemd.exec(5)).
_IN_JOURNAL = "JOURNAL_STREAM" in os.environ


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
    except OSError as error:
        failure = unwritable(error)
        give_up(context.host, failure)
        raise failure from error
    if context.json:
        context.print_json(_document(run))
    elif _IN_JOURNAL:
        _log(run)
    else:
        _say(run)
    raise typer.Exit(run.exit_status)


def _run(context: Context) -> Automatic:
    config = load_config(context.host, context.config_file)
    progress = progress_for_terminal()

    def tell(outcome: Outcome) -> None:
        progress.close()
        if _IN_JOURNAL:
            _log_outcome(outcome)
        elif not context.json:
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
    if run.held_again:
        typer.echo(f"held again: {', '.join(run.held_again)}")
    if run.held_back is not None:
        typer.echo(f"a reboot is held back: {run.held_back}")


def _log_outcome(outcome: Outcome) -> None:
    """One event per kernel that something was done about, or failed; none for the others."""
    release, error = outcome.step.release, outcome.error
    if error is not None:
        # some errors of a kernel name it themselves
        named = error.message if release in error.message else f"{release}: {error.message}"
        what = named + (f"; {error.hint}" if error.hint else "")
        journal(what, priority="error", event="rebuild-failed", kernel=release, code=error.code)
    elif isinstance(outcome.step, Rebuild):
        backup = outcome.backup or ""
        what = f"{release}: patched modules built and in place; what was there: backup {backup}"
        journal(what, priority="notice", event="rebuild-done", kernel=release, backup=backup)
    elif not isinstance(outcome.step, Leave):
        action = ACTIONS[type(outcome.step)]
        journal(f"{release}: {action} done", priority="notice", event=action, kernel=release)


def _log(run: Automatic) -> None:
    for release, reasons in run.unready.items():
        what = f"{release} is not ready: {'; '.join(reasons)} (gpuguard status)"
        journal(what, priority="warning", event="kernel-not-ready", kernel=release)
    for error in run.problems:
        what = error.message + (f"; {error.hint}" if error.hint else "")
        journal(what, priority="error", event="automatic-failed", code=error.code)
    if run.held_again:
        names = " ".join(run.held_again)
        journal(f"held again: {names}", priority="warning", event="held-again", packages=names)
    if run.held_back is not None:
        what = f"a reboot is held back: {run.held_back}"
        journal(what, priority="warning", event="reboot-held", kernel=run.next_release or "")


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
        "held_again": list(run.held_again),
    }
