"""``gpuguard setup``: install, or remove, what makes gpuguard work by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from gpuguard.cli.context import Context
from gpuguard.cli.session import changing
from gpuguard.config import Config
from gpuguard.config_file import read_config
from gpuguard.core.setup import Do, Step
from gpuguard.errors import ConfigError, UsageError, VerifyError
from gpuguard.verbs import setup as verb
from gpuguard.verbs import units
from gpuguard.verbs.setup import Prepared
from gpuguard.verbs.units import Effects

_SHELLS = ("bash", "zsh", "fish")
_LOCK_SECONDS = 60.0
_WORDS = {
    Do.WRITE: "write",
    Do.UPDATE: "update",
    Do.ENABLE: "enable",
    Do.REMOVE: "remove",
    Do.KEEP: "keep",
}
_REASONS = {
    "changed": "it was changed here; --force puts ours in its place",
    "disabled": "it was disabled here; --force enables it again",
}
_REASONS_OF_REMOVAL = {"changed": "it was changed here; --force removes it all the same"}


def setup(
    ctx: typer.Context,
    *,
    remove: Annotated[
        bool, typer.Option("--remove", help="Take away what an earlier set-up has installed.")
    ] = False,
    roll_back: Annotated[
        bool,
        typer.Option(
            "--roll-back/--keep-modules",
            help="With --remove: also put the stock modules back, for every kernel.",
        ),
    ] = False,
    program: Annotated[
        str | None,
        typer.Option("--program", metavar="PATH", help="What hooks and units call, in the root."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also files that were changed, units that were disabled."),
    ] = False,
    no_start: Annotated[
        bool, typer.Option("--no-start", help="Only install: tell systemd nothing, start nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be done, and stop.")
    ] = False,
) -> None:
    """Install systemd units, hooks of apt and kernels, manual pages and shell completion.

    From then on gpuguard notices new kernels and drivers by itself. Running it again brings
    everything up to date; what you have changed stays as it is.
    """
    context: Context = ctx.obj
    if roll_back and not remove:
        raise UsageError("--roll-back goes with --remove only")
    if remove:
        from gpuguard.cli.setup_remove import remove as take_away

        take_away(context, stock=roll_back, force=force, dry_run=dry_run)
        return
    config = _config(context)
    if dry_run:
        prepared = _prepared(context, config, program, force=force)
        say(context, prepared, "planned" if not prepared.is_empty else "nothing-to-do")
        return
    with changing(context, _LOCK_SECONDS):
        prepared = _prepared(context, config, program, force=force)
        if not prepared.is_empty:
            verb.install(context.host, prepared)
        effects = Effects() if no_start else _start(context, prepared)
    quiet = prepared.is_empty and not effects.started and not effects.failed
    say(context, prepared, "nothing-to-do" if quiet else "done", effects)
    if not context.json:
        _advise(context, config, prepared, started=not no_start)
    conclude(context, effects)


def say(
    context: Context,
    prepared: Prepared,
    outcome: str,
    effects: Effects | None = None,
    *,
    notes: Sequence[str] = (),
) -> None:
    """What is done, or would be: one line for each path, or one object."""
    effects = effects or Effects()
    if context.json:
        context.print_json(_document(prepared, outcome, effects, notes))
        return
    if prepared.account is not None:
        typer.echo(f"account  {prepared.account}")
    removal = prepared.plan.record is None
    reasons = _REASONS | (_REASONS_OF_REMOVAL if removal else {})
    for step in prepared.plan.steps:
        typer.echo(f"{_WORDS[step.do]:<8} {step.path}{_reason(step, reasons)}")
    for unit in effects.started:
        typer.echo(f"start    {unit}")
    for note in notes:
        typer.echo(note)
    if outcome == "nothing-to-do":
        typer.echo("all else is in place" if prepared.plan.kept else "everything is in place")


def _reason(step: Step, reasons: dict[str, str]) -> str:
    return f"  ({reasons[step.reason]})" if step.reason else ""


def _prepared(
    context: Context, config: Config | None, program: str | None, *, force: bool
) -> Prepared:
    return verb.prepare(context.host, config, completions(), program=program, force=force)


def completions() -> dict[str, str]:
    """The scripts with which shells complete ``gpuguard``, by shell."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    return {
        shell: get_completion_script(
            prog_name="gpuguard", complete_var="_GPUGUARD_COMPLETE", shell=shell
        )
        + "\n"
        for shell in _SHELLS
    }


def _config(context: Context) -> Config | None:
    try:
        return read_config(context.host, context.config_file)
    except ConfigError:
        return None  # of it only the account's name is wanted; `config validate` says the rest


def _advise(context: Context, config: Config | None, prepared: Prepared, *, started: bool) -> None:
    if config is None:
        typer.echo("next: gpuguard config init, set source.path, gpuguard config validate;")
        typer.echo("      without a configuration nothing is rebuilt")
    if not prepared.plan.changes:
        return
    if not units.has_systemd(context.host):
        typer.echo("systemd is not at work here: the units start at the next boot")
    elif not started:
        typer.echo("nothing was started; at the next boot the units start, or now by:")
        typer.echo("  gpuguard setup")


def _start(context: Context, prepared: Prepared) -> Effects:
    return units.start(context.host, prepared.plan, prepared.units, is_upgrade=prepared.is_upgrade)


def conclude(context: Context, effects: Effects) -> None:
    """Fail, if systemd did; one object has been printed already."""
    if effects.failed:
        error = VerifyError(
            f"installed, but systemd could not do all of it: {', '.join(effects.failed)}",
            code="units-not-started",
            hint="see why: journalctl -b -u UNIT; then run gpuguard setup again",
            detail="\n".join(f"{unit}: {why}" for unit, why in effects.failed.items()),
        )
        raise error if not context.json else typer.Exit(error.exit_status)


def _document(
    prepared: Prepared, outcome: str, effects: Effects, notes: Sequence[str]
) -> dict[str, Any]:
    record = prepared.plan.record
    return {
        "schema": 1,
        "outcome": outcome,
        "program": record.program if record is not None else None,
        "account": prepared.account,
        "steps": [
            {"action": step.do.value, "path": step.path, "reason": step.reason}
            for step in prepared.plan.steps
        ],
        "started": effects.started,
        "failed": effects.failed,
        "needed_by": [asdict(one) for one in prepared.needed_by],
        "notes": [" ".join(note.split()) for note in notes],
    }
