"""``gpuguard upgrade``: the maintenance window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals
from typing import Annotated

import typer

from gpuguard.apply.lock import exclusive, wait_for_package_tools
from gpuguard.cli.context import Context
from gpuguard.cli.progress import Bar, Lines, progress_for_terminal
from gpuguard.cli.render import shown
from gpuguard.cli.session import changing, pending_note, require_root
from gpuguard.cli.steps import say_outcome
from gpuguard.cli.upgrade_text import (
    preflight_document,
    preflight_text,
    report_document,
    report_text,
    say_error,
    windows_text,
)
from gpuguard.config import Config
from gpuguard.config_file import load_config
from gpuguard.errors import GpuguardError, Interrupted, LockHeldError, UsageError
from gpuguard.verbs.rebuild import Outcome
from gpuguard.verbs.upgrade import Report, carry_out, noted_preflight
from gpuguard.verbs.upgrade_preflight import Preflight, Wish, error_of, prepare
from gpuguard.window import list_windows, read_window, window_document

_REBOOT_SECONDS = 60.0
_BY_SIGNAL = 128


def upgrade(
    ctx: typer.Context,
    packages: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PACKAGE[=VERSION]]...",
            help="These packages; default: all that the policy holds, and upgrade.packages.",
        ),
    ] = None,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Print the plan and the preflight's verdict.")
    ] = False,
    no_build: Annotated[
        bool,
        typer.Option("--no-build", help="Do not try the builds first. Faster, and less is known."),
    ] = False,
    allow_removals: Annotated[
        bool,
        typer.Option("--allow-removals", help="Also if apt would remove other packages."),
    ] = False,
    reboot: Annotated[
        bool, typer.Option("--reboot", help="Reboot at the end, if that is safe.")
    ] = False,
    history: Annotated[
        bool, typer.Option("--history", help="List the maintenance windows so far.")
    ] = False,
) -> None:
    """Upgrade kernels and drivers in a maintenance window that ends as it began: on hold.

    First looks and tries: what would apt do, is there a patched source for the new driver, do
    the patched modules compile for the new kernel. Then lifts gpuguard's holds, lets apt
    install, puts the modules in place, looks at the next boot, and holds again on every way out.

    Exit status: 0 done and the next boot is safe, or nothing to upgrade; 1 done, and a reboot
    is not safe; 65 and above: refused before anything was changed, or what failed.
    """
    context: Context = ctx.obj
    if history:
        _show_history(context)
        return
    config = load_config(context.host, context.config_file)
    if reboot and not context.host.is_live:
        raise UsageError("--reboot: only the running system can be rebooted", code="usage")
    wish = Wish(
        packages=tuple(packages or ()),
        allow_removals=allow_removals,
        build=not no_build,
        fetch=not dry_run,
    )
    if dry_run:
        _show_plan(context, config, wish)
    report = _run(context, config, wish)
    if report is None:
        raise typer.Exit(0)
    if reboot:
        _reboot(context, report)
    raise typer.Exit(report.exit_status)


def _run(context: Context, config: Config, wish: Wish) -> Report | None:
    """The window; None if there was nothing to upgrade."""
    progress = progress_for_terminal()
    listener = None
    try:
        with changing(context, config.lock_timeout_seconds):
            with noted_preflight(context.host):
                preflight = prepare(context.host, config, wish, progress)
            progress.close()
            if preflight.refusals:
                raise error_of(preflight)
            if preflight.is_empty:
                _say_nothing_to_do(context, preflight)
                return None
            if not context.json:
                typer.echo(preflight_text(preflight))
            listener = _Listener(context, progress, preflight)
            report = carry_out(context.host, config, preflight, progress, listener)
    except Interrupted as error:
        if listener is None or not listener.was_stopped:
            raise
        typer.echo(f"gpuguard: stopped by {Signals(error.signum).name}", err=True)
        raise typer.Exit(_BY_SIGNAL + error.signum) from None
    finally:
        progress.close()
    _say_report(context, preflight, report)
    return report


def _say_report(context: Context, preflight: Preflight, report: Report) -> None:
    if context.json:
        context.print_json(report_document(preflight, report))
        return
    typer.echo(report_text(report))
    for error in filter(None, (report.error, *report.problems)):
        say_error(error)


def _say_nothing_to_do(context: Context, preflight: Preflight) -> None:
    if context.json:
        context.print_json(preflight_document(preflight))
    else:
        typer.echo(preflight_text(preflight))


def _show_plan(context: Context, config: Config, wish: Wish) -> None:
    progress = progress_for_terminal()
    with _looking(context, config):
        try:
            preflight = prepare(context.host, config, wish, progress)
        finally:
            progress.close()
    if context.json:
        context.print_json(preflight_document(preflight))
    else:
        typer.echo(preflight_text(preflight))
        if note := pending_note(context):
            typer.echo(f"note: {note}")
    if preflight.refusals:
        raise typer.Exit(preflight.refusals[0].exit_status)
    raise typer.Exit(0 if preflight.is_empty else 1)


@contextmanager
def _looking(context: Context, config: Config) -> Iterator[None]:
    """For a dry run: builds in our own cache need the lock, and nothing is cleaned up."""
    require_root(context)
    with exclusive(context.host, config.lock_timeout_seconds):
        wait_for_package_tools(context.host, config.lock_timeout_seconds)
        yield


class _Listener:
    """Shows apt's output as it comes, on stderr if JSON is asked for."""

    def __init__(self, context: Context, progress: Bar | Lines, preflight: Preflight) -> None:
        self._context, self._progress, self._preflight = context, progress, preflight
        self.was_stopped = False

    def line(self, text: str) -> None:
        """A line of apt's."""
        typer.echo(f"  | {shown(text)}", err=self._context.json)

    def waiting(self) -> None:
        """Ctrl-C in the middle of dpkg."""
        typer.echo("gpuguard: dpkg is let finish first, then everything is held again", err=True)

    def outcome(self, outcome: Outcome) -> None:
        """One kernel."""
        self._progress.close()
        if not self._context.json:
            say_outcome(outcome)

    def stopped(self, report: Report) -> None:
        """What was done until somebody ended us."""
        self.was_stopped = True
        self._progress.close()
        _say_report(self._context, self._preflight, report)


def _show_history(context: Context) -> None:
    windows = [*list_windows(context.host)]
    if (present := read_window(context.host)) is not None:
        windows.append(present)
    if context.json:
        documents = [window_document(window) for window in windows]
        context.print_json({"schema": 1, "windows": documents})
    else:
        typer.echo(windows_text(windows))


def _reboot(context: Context, report: Report) -> None:
    """Reboot if that was found safe.

    Raises:
        GpuguardError: it is not, with why.
        LockHeldError: logind does not let it: somebody else holds a reboot back.
    """
    if report.exit_status != 0 or not report.window.reboot_safe:
        reasons = "; ".join(report.window.reasons) or "the window failed"
        raise GpuguardError(
            f"not rebooted: {reasons}", code="reboot-not-safe", hint="see: gpuguard status"
        )
    done = context.host.run(
        "systemctl", "reboot", "--check-inhibitors=yes", timeout=_REBOOT_SECONDS, ok=None
    )
    if done.exit_status != 0:
        raise LockHeldError(
            "systemd did not begin the reboot",
            code="reboot-refused",
            hint="see who holds it back: systemd-inhibit --list",
            detail=(done.stderr or done.stdout).strip(),
        )
