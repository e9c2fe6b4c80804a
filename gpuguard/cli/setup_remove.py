"""``gpuguard setup --remove``."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from gpuguard.cli.context import Context
from gpuguard.cli.session import changing
from gpuguard.cli.setup import conclude, say
from gpuguard.config_file import read_config
from gpuguard.core.facts import HostFacts, Identity
from gpuguard.errors import LockHeldError
from gpuguard.host import Host
from gpuguard.ledger import read_ledger
from gpuguard.setup_record import read_setup
from gpuguard.verbs import setup as verb
from gpuguard.verbs.inspect import look
from gpuguard.verbs.rollback import plan_rollback, roll_back
from gpuguard.window import read_window

_LOCK_SECONDS = 60.0


def remove(context: Context, *, stock: bool, force: bool, dry_run: bool) -> None:
    """Take everything away that a set-up has brought; the modules by choice."""
    host = context.host
    if dry_run:
        prepared = verb.prepare_removal(host, force=force)
        say(context, prepared, "planned")
        if not context.json:
            for release in _patched(_look(context)):
                typer.echo(_about_modules(release, stock=stock))
        return
    with changing(context, _LOCK_SECONDS):
        _refuse_open_window(host)
        prepared = verb.prepare_removal(host, force=force)
        notes = list(_notes(host))
        if stock:
            _roll_back(context)
        else:
            notes[:0] = [_about_modules(r, stock=False) for r in _patched(_look(context))]
        effects = verb.remove(host, prepared)
    say(context, prepared, "done", effects)
    if not context.json:
        for note in notes:
            typer.echo(note)
    conclude(context, effects)


def _refuse_open_window(host: Host) -> None:
    window = read_window(host)
    if window is not None and window.phase.is_open:
        raise LockHeldError(
            f"a maintenance window is open since {window.started}",
            code="window-open",
            hint="wait until it is done; if it was interrupted: gpuguard hold, then try again",
        )


def _notes(host: Host) -> Iterator[str]:
    """What stays, because it is the operator's to decide about."""
    ledger = read_ledger(host)
    if ledger is not None and ledger.packages:
        names = ", ".join(sorted(ledger.packages))
        yield f"stays    packages on hold: {names}; to lift that: gpuguard unhold"
    record = read_setup(host)
    if record is not None and record.account is not None:
        yield f"stays    the account {record.account}; when nothing builds any more: userdel"


def _look(context: Context) -> HostFacts:
    config = read_config(context.host, context.config_file)
    return look(context.host, config, with_p2p=False, strict=False)


def _patched(facts: HostFacts) -> list[str]:
    return [
        kernel.release
        for kernel in facts.kernels
        if any(module.identity is Identity.PATCHED for module in kernel.modules)
    ]


def _about_modules(release: str, *, stock: bool) -> str:
    if stock:
        return f"stock    {release}: the modules of before come back"
    return f"stays    the patched modules of {release}; nothing looks after them from now on"


def _roll_back(context: Context) -> None:
    """The stock modules, for every kernel that has ours; a failure ends the removal."""
    config = read_config(context.host, context.config_file)
    facts = look(context.host, config, with_p2p=False)
    for release in _patched(facts):
        plan = plan_rollback(context.host, facts, release, None, stock=True)
        roll_back(context.host, config, plan)
        if not context.json:
            typer.echo(_about_modules(release, stock=True))
