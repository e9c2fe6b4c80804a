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
from gpuguard.verbs import setup_remove as verb
from gpuguard.verbs.inspect import configured, look
from gpuguard.verbs.rollback import bring_stock_back
from gpuguard.verbs.setup import Prepared
from gpuguard.window import read_window

_LOCK_SECONDS = 60.0


def remove(context: Context, *, stock: bool, force: bool, dry_run: bool) -> None:
    """Take everything away that a set-up has brought; the modules by choice."""
    host = context.host
    if dry_run:
        prepared = verb.prepare_removal(host, force=force)
        notes = [_about_modules(release, stock=stock) for release in _patched(_look(context))]
        notes += [*verb.pinned_note(host), *_needed(prepared)]
        say(context, prepared, "planned", notes=notes)
        return
    with changing(context, _LOCK_SECONDS):
        _refuse_open_window(host)
        prepared = verb.prepare_removal(host, force=force)
        if not force:
            verb.refuse_if_needed(prepared.needed_by)
        notes = [*_notes(host), *_needed(prepared)]
        if stock:
            _roll_back(context)
        else:
            notes[:0] = [_about_modules(r, stock=False) for r in _patched(_look(context))]
        effects, more = verb.remove(host, prepared)
    say(context, prepared, "done", effects, notes=[*notes, *more])
    conclude(context, effects)


def _needed(prepared: Prepared) -> Iterator[str]:
    for one in prepared.needed_by:
        yield f"breaks   {one.text}: it cannot start any more"


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
    config, _ = configured(context.host, context.config_file)  # a typo keeps nobody here
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
        kernel = next(k for k in facts.kernels if k.release == release)
        bring_stock_back(context.host, config, kernel)
        if not context.json:
            typer.echo(_about_modules(release, stock=True))
