"""``gpuguard setup --remove``."""

from __future__ import annotations

import typer

from gpuguard.cli.context import Context
from gpuguard.cli.session import changing
from gpuguard.cli.setup import conclude, say
from gpuguard.config_file import read_config
from gpuguard.core.facts import Identity
from gpuguard.errors import LockHeldError
from gpuguard.host import Host
from gpuguard.verbs import setup as verb
from gpuguard.verbs.inspect import look
from gpuguard.verbs.rollback import plan_rollback, roll_back
from gpuguard.window import read_window

_LOCK_SECONDS = 60.0


def remove(context: Context, *, stock: bool, force: bool, dry_run: bool) -> None:
    """Take everything away that a set-up has brought; the modules by choice."""
    if dry_run:
        say(context, verb.prepare_removal(context.host, force=force), "planned")
        return
    with changing(context, _LOCK_SECONDS):
        _refuse_open_window(context.host)
        prepared = verb.prepare_removal(context.host, force=force)
        if stock:
            _roll_back(context)
        effects = verb.remove(context.host, prepared)
    say(context, prepared, "done", effects)
    conclude(effects)


def _refuse_open_window(host: Host) -> None:
    window = read_window(host)
    if window is not None and window.phase.is_open:
        raise LockHeldError(
            f"a maintenance window is open since {window.started}",
            code="window-open",
            hint="wait until it is done; if it was interrupted: gpuguard hold, then try again",
        )


def _roll_back(context: Context) -> None:
    """The stock modules, for every kernel that has ours; a failure ends the removal."""
    config = read_config(context.host, context.config_file)
    facts = look(context.host, config, with_p2p=False)
    for kernel in facts.kernels:
        if any(module.identity is Identity.PATCHED for module in kernel.modules):
            plan = plan_rollback(context.host, facts, kernel.release, None, stock=True)
            roll_back(context.host, config, plan)
            if not context.json:
                typer.echo(f"stock    {kernel.release}: the modules of before are back")
