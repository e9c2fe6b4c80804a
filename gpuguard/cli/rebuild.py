"""``gpuguard plan`` and ``gpuguard rebuild``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuguard.apply.bootdefault import settle_boot_default
from gpuguard.cli.automatic import run_by_itself
from gpuguard.cli.context import Context
from gpuguard.cli.progress import progress_for_terminal
from gpuguard.cli.session import changing, pending_note
from gpuguard.cli.steps import (
    outcome_document,
    say_outcome,
    say_unready,
    step_document,
    step_text,
)
from gpuguard.config import Config
from gpuguard.config_file import load_config
from gpuguard.core.boot_default import Pinning
from gpuguard.core.plan import Rebuild, Request
from gpuguard.errors import GpuguardError, UsageError
from gpuguard.verbs.inspect import Planned, look, make_plan, next_release
from gpuguard.verbs.reboot_hold import while_building
from gpuguard.verbs.rebuild import Outcome, left_unready, worst_exit_status
from gpuguard.verbs.rebuild import rebuild as carry_out

Kernels = Annotated[
    list[str] | None,
    typer.Option("--kernel", "-k", metavar="RELEASE", help="This kernel; may be repeated."),
]
Next = Annotated[bool, typer.Option("--next", help="Only the kernel that boots next.")]
All = Annotated[
    bool,
    typer.Option(
        "--all", help="Every installed kernel, also those that kernels.ignore leaves alone."
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Also where nothing changed, or where it failed before."),
]


def plan(
    ctx: typer.Context,
    *,
    kernel: Kernels = None,
    next_only: Next = False,
    all_kernels: All = False,
    force: Force = False,
) -> None:
    """Show what a rebuild would do, why, and what is in its way. Changes nothing.

    Exit status: 0 nothing to do, 1 something to do, 69 and others: something is in the way.
    """
    context: Context = ctx.obj
    config = load_config(context.host, context.config_file)
    request = _request(context, config, kernel, next_only=next_only, all_=all_kernels, force=force)
    planned = make_plan(context.host, config, request)
    show_plan(context, planned)


def rebuild(
    ctx: typer.Context,
    *,
    kernel: Kernels = None,
    next_only: Next = False,
    all_kernels: All = False,
    force: Force = False,
    automatic: Annotated[
        bool,
        typer.Option(
            "--automatic",
            help="As gpuguard-rebuild.service does: wait long for apt, leave alone what was "
            "rolled back, also look after holds and reboots.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Print the plan (gpuguard plan) and stop.")
    ] = False,
) -> None:
    """Build the patched modules and put them in place, with a backup of what was there.

    Works for any installed kernel, running or not; by default for every one that is not
    ready. DKMS's own files are left alone. A failure leaves the host exactly as it was.

    Exit status: 0 done, 1 nothing failed but a kernel is not ready (a key is not enrolled,
    nothing new can be tried), 65 and above: what failed first.
    """
    context: Context = ctx.obj
    if automatic:
        if kernel or next_only or all_kernels or force:
            raise UsageError("--automatic decides by itself: give no kernel and no --force")
        run_by_itself(context, dry_run=dry_run)
        return
    if dry_run:
        plan(ctx, kernel=kernel, next_only=next_only, all_kernels=all_kernels, force=force)
        return
    config = load_config(context.host, context.config_file)
    with changing(context, config.lock_timeout_seconds):
        request = _request(
            context, config, kernel, next_only=next_only, all_=all_kernels, force=force
        )
        planned = make_plan(context.host, config, request)
        outcomes = _run(context, config, planned)
        _let_go_of_boot_default(context, config)
        unready = left_unready(context.host, config, outcomes)
    if context.json:
        context.print_json({
            "schema": 1,
            "steps": [outcome_document(o, unready) for o in outcomes],
        })  # fmt: skip
    else:
        say_unready(outcomes, unready)
    raise typer.Exit(worst_exit_status(outcomes, unready))


def _let_go_of_boot_default(context: Context, config: Config) -> None:
    """What kept an older kernel the boot default goes once the newest one is ready."""
    try:
        facts = look(context.host, config, with_p2p=False)
        settled = settle_boot_default(context.host, config, facts, "rebuild")
    except GpuguardError as error:
        typer.echo(f"gpuguard: boot default: {error.message} [{error.code}]", err=True)
        return
    if settled.pinning is not Pinning.NONE:
        what = settled.release or "the newest kernel again"
        typer.echo(f"gpuguard: the boot default is {what}: {settled.reason}", err=True)


def _run(context: Context, config: Config, planned: Planned) -> list[Outcome]:
    progress = progress_for_terminal()
    outcomes = []
    builds = tuple(s.release for s in planned.plan.steps if isinstance(s, Rebuild))
    try:
        with while_building(context.host, config, builds):
            for outcome in carry_out(context.host, config, planned, progress):
                progress.close()
                outcomes.append(outcome)
                if not context.json:
                    say_outcome(outcome)
    finally:
        progress.close()
    return outcomes


def _request(
    context: Context,
    config: Config,
    kernels: list[str] | None,
    *,
    next_only: bool,
    all_: bool,
    force: bool,
) -> Request:
    if sum((bool(kernels), next_only, all_)) > 1:
        raise UsageError("give only one of --kernel, --next and --all")
    if kernels:
        return Request(releases=tuple(kernels), force=force)
    if not next_only and not all_:
        return Request(force=force)
    facts = look(context.host, config, with_p2p=False)
    if next_only:
        return Request(releases=(next_release(facts),), force=force)
    installed = tuple(k.release for k in facts.kernels if k.image is not None)
    return Request(releases=installed, force=force)


def show_plan(context: Context, planned: Planned) -> None:
    """Print a plan and end with its exit status."""
    steps = planned.plan.steps
    if context.json:
        document = {
            "schema": 1,
            "converged": planned.plan.is_converged,
            "steps": [step_document(step) for step in steps],
        }
        context.print_json(document)
    else:
        for step in steps:
            typer.echo(step_text(step))
        if planned.plan.is_converged:
            typer.echo(_nothing_to_do(planned))
        if note := pending_note(context):
            typer.echo(f"note: {note}")
    blocked = [s for s in steps if isinstance(s, Rebuild) and s.blockers]
    if blocked:
        raise typer.Exit(blocked[0].blockers[0].exit_status)
    if not any(kernel.image for kernel in planned.facts.kernels):
        raise typer.Exit(3)
    raise typer.Exit(0 if planned.plan.is_converged and planned.plan.is_ready else 1)


def _nothing_to_do(planned: Planned) -> str:
    if not any(kernel.image for kernel in planned.facts.kernels):
        return "no installed kernel was found: an image in /boot and a tree in /lib/modules"
    if not planned.plan.is_ready:
        return "not every kernel is ready, and nothing new can be tried"
    return "nothing to do"
