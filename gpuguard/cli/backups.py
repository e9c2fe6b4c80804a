"""``gpuguard backups`` and ``gpuguard rollback``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gpuguard.apply.backups import Backup, list_backups
from gpuguard.cli.context import Context
from gpuguard.cli.render import table
from gpuguard.cli.session import changing
from gpuguard.config_file import read_config
from gpuguard.errors import UsageError
from gpuguard.verbs.inspect import look
from gpuguard.verbs.rollback import RollbackPlan, plan_rollback, roll_back

Kernel = Annotated[
    str | None, typer.Option("--kernel", "-k", metavar="RELEASE", help="Only this kernel.")
]


def backups(ctx: typer.Context, *, kernel: Kernel = None) -> None:
    """List backups: what resolved before each change, newest last."""
    context: Context = ctx.obj
    found = list_backups(context.host, kernel)
    if context.json:
        context.print_json({"schema": 1, "backups": [_document(backup) for backup in found]})
        return
    if not found:
        typer.echo("no backups yet; every rebuild and rollback makes one first")
        return
    rows = [["id", "kernel", "held", "driver", "why"]]
    rows += [[b.id, b.release, b.identity, _version(b), b.reason] for b in found]
    typer.echo(table(rows))


def rollback(
    ctx: typer.Context,
    *,
    backup_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="Backup to put back (gpuguard backups); default: the newest that differs.",
        ),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option("--kernel", "-k", metavar="RELEASE", help="Default: the next kernel."),
    ] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="The newest backup that holds unpatched modules.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be put back, and stop.")
    ] = False,
) -> None:
    """Put back what resolved before a change, byte for byte, checked by SHA-256.

    A rollback takes a backup first, so it can itself be rolled back.
    """
    context: Context = ctx.obj
    if stock and backup_id is not None:
        raise UsageError("give either an ID or --stock")
    config = read_config(context.host, context.config_file)
    if dry_run:
        facts = look(context.host, config, with_p2p=False)
        _say_plan(context, plan_rollback(context.host, facts, kernel, backup_id, stock=stock))
        return
    with changing(context, config.lock_timeout_seconds if config else 60.0):
        facts = look(context.host, config, with_p2p=False)
        plan = plan_rollback(context.host, facts, kernel, backup_id, stock=stock)
        before = roll_back(context.host, config, plan)
    if context.json:
        document = _plan_document(plan)
        context.print_json({**document, "backup_before": before})
        return
    typer.echo(
        f"{plan.kernel.release}: {plan.backup.identity} modules of backup {plan.backup.id} are back"
    )
    typer.echo(f"  to undo this: gpuguard rollback {before}")


def _say_plan(context: Context, plan: RollbackPlan) -> None:
    if context.json:
        context.print_json(_plan_document(plan))
        return
    typer.echo(f"{plan.kernel.release}: put back backup {plan.backup.id} ({plan.backup.identity})")
    for module in plan.backup.modules:
        typer.echo(f"  {module.name}: {module.path} sha256 {module.digest[:16]}")


def _plan_document(plan: RollbackPlan) -> dict[str, Any]:
    return {"schema": 1, "release": plan.kernel.release, "backup": _document(plan.backup)}


def _version(backup: Backup) -> str:
    versions = {module.version for module in backup.modules if module.version}
    return ", ".join(sorted(versions)) or "-"


def _document(backup: Backup) -> dict[str, Any]:
    return {
        "id": backup.id,
        "release": backup.release,
        "created": backup.created,
        "reason": backup.reason,
        "identity": backup.identity,
        "modules": [
            {
                "name": module.name,
                "path": module.path,
                "sha256": module.digest,
                "build_id": module.build_id,
                "identity": module.identity,
                "version": module.version,
            }
            for module in backup.modules
        ],
    }
