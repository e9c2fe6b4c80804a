"""``gpuguard plan`` and ``gpuguard rebuild``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gpuguard.cli.context import Context
from gpuguard.cli.progress import progress_for_terminal
from gpuguard.cli.session import changing, pending_note
from gpuguard.config import Config
from gpuguard.config_file import load_config
from gpuguard.core.plan import Forget, Leave, Rebuild, RefreshInitramfs, Request, Step
from gpuguard.errors import UsageError
from gpuguard.verbs.inspect import Planned, look, make_plan, next_release
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
    _show_plan(context, planned)


def rebuild(
    ctx: typer.Context,
    *,
    kernel: Kernels = None,
    next_only: Next = False,
    all_kernels: All = False,
    force: Force = False,
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
    if dry_run:
        plan(ctx, kernel=kernel, next_only=next_only, all_kernels=all_kernels, force=force)
        return
    context: Context = ctx.obj
    config = load_config(context.host, context.config_file)
    with changing(context, config.lock_timeout_seconds):
        request = _request(
            context, config, kernel, next_only=next_only, all_=all_kernels, force=force
        )
        planned = make_plan(context.host, config, request)
        outcomes = _run(context, config, planned)
        unready = left_unready(context.host, config, outcomes)
    if context.json:
        context.print_json({
            "schema": 1,
            "steps": [_outcome_document(o, unready) for o in outcomes],
        })  # fmt: skip
    else:
        _say_unready(outcomes, unready)
    raise typer.Exit(worst_exit_status(outcomes, unready))


def _run(context: Context, config: Config, planned: Planned) -> list[Outcome]:
    progress = progress_for_terminal()
    outcomes = []
    try:
        for outcome in carry_out(context.host, config, planned, progress):
            progress.close()
            outcomes.append(outcome)
            if not context.json:
                _say_outcome(outcome)
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


def _show_plan(context: Context, planned: Planned) -> None:
    steps = planned.plan.steps
    if context.json:
        document = {
            "schema": 1,
            "converged": planned.plan.is_converged,
            "steps": [_step_document(step) for step in steps],
        }
        context.print_json(document)
    else:
        for step in steps:
            typer.echo(_step_text(step))
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


def _step_text(step: Step) -> str:
    match step:
        case Rebuild():
            lines = [f"{step.release}: rebuild"]
            lines += [f"  because {reason}" for reason in step.reasons]
            for blocker in step.blockers:
                lines.append(f"  blocked: {blocker.message} [{blocker.code}]")
                lines += [f"    -> {line}" for line in blocker.hint.splitlines()]
            return "\n".join(lines)
        case RefreshInitramfs():
            reasons = "".join(f"\n  because {reason}" for reason in step.reasons)
            return f"{step.release}: rebuild the initramfs{reasons}"
        case Forget():
            return f"{step.release}: gone; remove our records and configuration for it"
        case Leave():
            return f"{step.release}: leave alone: {step.reason}"


def _step_document(step: Step) -> dict[str, Any]:
    document: dict[str, Any] = {"release": step.release, "action": _action_word(step)}
    match step:
        case Rebuild():
            document["reasons"] = list(step.reasons)
            document["blockers"] = [
                {"code": b.code, "message": b.message, "hint": b.hint} for b in step.blockers
            ]
        case RefreshInitramfs():
            document["reasons"] = list(step.reasons)
        case Leave():
            document |= {"reasons": [step.reason], "ready": step.is_ready}
        case Forget():
            document["reasons"] = ["the kernel is gone"]
    return document


def _action_word(step: Step) -> str:
    words = {
        Rebuild: "rebuild",
        RefreshInitramfs: "refresh-initramfs",
        Forget: "forget",
        Leave: "leave",
    }
    return words[type(step)]


def _outcome_document(outcome: Outcome, unready: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    document = _step_document(outcome.step)
    document["ok"] = outcome.error is None
    if outcome.error is None and not isinstance(outcome.step, Forget):
        document["ready"] = outcome.step.release not in unready
        document["not_ready_because"] = list(unready.get(outcome.step.release, ()))
    if outcome.error is not None:
        error = outcome.error
        document["error"] = {
            "code": error.code,
            "message": error.message,
            "hint": error.hint,
            "detail": error.detail,
            "exit_status": error.exit_status,
        }
    if outcome.backup is not None:
        document["backup"] = outcome.backup
    if outcome.result is not None:
        document["build_ids"] = {m.name: m.build_id for m in outcome.result.modules}
        document["duration_seconds"] = round(outcome.result.duration_seconds, 1)
        document["core_cached"] = outcome.result.core_cached
        document["log"] = outcome.result.log
    return document


def _say_unready(outcomes: list[Outcome], unready: Mapping[str, tuple[str, ...]]) -> None:
    left_alone = {o.step.release for o in outcomes if isinstance(o.step, Leave)}  # has said why
    for release, reasons in unready.items():
        if release not in left_alone:
            typer.echo(f"{release}: done, but not ready: {'; '.join(reasons)} (gpuguard status)")


def _say_outcome(outcome: Outcome) -> None:
    release = outcome.step.release
    if outcome.error is not None:
        error = outcome.error
        typer.secho(f"{release}: FAILED [{error.code}]", fg=typer.colors.RED, bold=True, err=True)
        typer.echo(f"  {error.message}", err=True)
        for line in error.detail.splitlines():
            typer.echo(f"  | {line}", err=True)
        for line in error.hint.splitlines():
            typer.echo(f"  -> {line}", err=True)
        return
    match outcome.step:
        case Rebuild() if outcome.result is not None:
            done = typer.style("patched", fg=typer.colors.GREEN, bold=True)
            seconds = f"{outcome.result.duration_seconds:.0f} s"
            typer.echo(f"{release}: {done} in {seconds}; what was there: backup {outcome.backup}")
        case RefreshInitramfs():
            typer.echo(f"{release}: initramfs rebuilt; the old one: backup {outcome.backup}")
        case _:
            typer.echo(_step_text(outcome.step))
