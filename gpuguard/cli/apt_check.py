"""``gpuguard apt-check``: apt's question, by way of the hook ``apt-check``; not for people.

Exit status 0: apt goes on. Only ``REFUSED`` stops it, so that no fault of ours ever does.
"""

from __future__ import annotations

import sys

import typer

from gpuguard.cli.context import Context
from gpuguard.config_file import read_config
from gpuguard.core.apt_check import ENVIRONMENT, REFUSED
from gpuguard.verbs.apt_check import check


def apt_check(ctx: typer.Context) -> None:
    """Look at apt's list of packages on standard input (protocol 3), and warn or refuse.

    For apt's hook. Exit status: 0 go on, 99 stop; any other means that nobody could look.
    """
    context: Context = ctx.obj
    config = read_config(context.host, context.config_file)
    if config is None or config.apt.check == "never":
        return
    found = check(context.host, config, sys.stdin.read())
    if not found:
        return
    refuses = config.apt.check == "refuse"
    for objection in found:
        typer.echo(f"gpuguard: {objection.message}")
        typer.echo(f"  -> {objection.remedy}")
    if refuses:
        typer.echo("gpuguard: so apt is stopped before anything is changed (apt.check: refuse).")
        typer.echo(f"  -> to go on all the same: {ENVIRONMENT}=never apt-get ...")
        raise typer.Exit(REFUSED)
    typer.echo("gpuguard: apt goes on (apt.check: warn); without a rebuild the new one has no P2P.")
