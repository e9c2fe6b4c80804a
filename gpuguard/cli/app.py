"""The command line: options before the verb, and the verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuguard import __version__, state
from gpuguard.cli.context import Context
from gpuguard.cli.lazy import lazy_group
from gpuguard.cli.output import Output
from gpuguard.errors import UsageError
from gpuguard.host import LocalHost

_HELP = """Keep a GPU host's patched NVIDIA modules patched.

Consumer NVIDIA cards talk to each other directly (P2P) only with a patched build of the
open kernel modules. A kernel update makes DKMS rebuild them without the patch, and nothing
complains. gpuguard notices before the reboot, rebuilds, and can put everything back.

\b
  gpuguard status              what would the next boot load, and is that right
  gpuguard doctor              why there is no (good) P2P: every known cause, with a remedy
  gpuguard verify              do the cards reach each other, every ordered pair
  gpuguard plan                what a rebuild would do
  gpuguard rebuild             do it
  gpuguard reload              load the patched modules without a reboot
  gpuguard backups, rollback   put back what was there before
  gpuguard hold, unhold, holds keep kernel and driver packages as they are
  gpuguard upgrade             change them in a maintenance window, tried before it opens
  gpuguard lane                switch between engines and models behind one address
  gpuguard setup               make it work by itself: units, hooks of apt and kernels
  gpuguard serve, metrics      metrics for Prometheus, by a daemon or once
  gpuguard demo                watch the whole story on a simulated host

Exit status: 0 fine, 1 not healthy, 2 usage, 3 could not be determined; verbs that act use
sysexits (65 patch rejected, 69 unavailable, 70 build or verify failed, 71 rollback failed,
74 records or output, 75 lock held, 77 needs root, 78 configuration). lane: 69 refused and nothing
was stopped, 70 failed and another lane serves, 71 failed and nothing serves, 75 a switch is
under way, 78 a lane's file.
"""

_VERBS = {
    "status": "gpuguard.cli.status:status",
    "verify": "gpuguard.cli.verify:verify",
    "doctor": "gpuguard.cli.doctor:doctor",
    "plan": "gpuguard.cli.rebuild:plan",
    "rebuild": "gpuguard.cli.rebuild:rebuild",
    "reload": "gpuguard.cli.reload:reload",
    "backups": "gpuguard.cli.backups:backups",
    "rollback": "gpuguard.cli.backups:rollback",
    "hold": "gpuguard.cli.holds:hold",
    "unhold": "gpuguard.cli.holds:unhold",
    "holds": "gpuguard.cli.holds:holds",
    "upgrade": "gpuguard.cli.upgrade:upgrade",
    "setup": "gpuguard.cli.setup:setup",
    "apt-check": "gpuguard.cli.apt_check:apt_check",
    "serve": "gpuguard.cli.serve:serve",
    "metrics": "gpuguard.cli.metrics:metrics",
    "demo": "gpuguard.cli.demo:demo",
    "lane": "gpuguard.cli.lane:app",
    "config": "gpuguard.cli.config:app",
}

app = typer.Typer(
    name="gpuguard",
    cls=lazy_group(_VERBS, hidden=("apt-check",)),
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpuguard {__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    *,
    root: Annotated[
        str,
        typer.Option(
            "--root",
            metavar="DIR",
            help="Work on this directory tree instead of the running system.",
        ),
    ] = "/",
    config_file: Annotated[
        str,
        typer.Option("--config", metavar="FILE", help="Configuration file, inside the root."),
    ] = state.CONFIG_FILE,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
    version: Annotated[  # noqa: ARG001 - acts by its callback
        bool,
        typer.Option(
            "--version", callback=lambda value: _print_version(wanted=value), is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Options before the verb."""
    if not root:  # an unset variable in a script must not mean the folder it happens to be in
        raise UsageError("--root: give a directory, not an empty name", code="usage")
    if not Path(root).is_dir():
        raise UsageError(f"--root {root}: not a directory", code="no-such-root")
    if not config_file.startswith("/"):
        raise UsageError(
            f"--config {config_file}: give an absolute path (inside the root)", code="usage"
        )
    output = ctx.obj if isinstance(ctx.obj, Output) else Output()
    ctx.obj = Context(host=LocalHost(root), config_file=config_file, json=json, output=output)
