"""A plan's steps and what became of them, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from gpuguard.core.plan import Forget, Leave, Rebuild, RefreshInitramfs, Step
from gpuguard.verbs.automatic import ACTIONS
from gpuguard.verbs.rebuild import Outcome


def step_text(step: Step) -> str:
    """One step of a plan, in words."""
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


def step_document(step: Step) -> dict[str, Any]:
    """One step of a plan as JSON; see docs/json.md."""
    document: dict[str, Any] = {"release": step.release, "action": ACTIONS[type(step)]}
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


def outcome_document(outcome: Outcome, unready: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """What became of a step, as JSON; see docs/json.md."""
    document = step_document(outcome.step)
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


def say_unready(outcomes: list[Outcome], unready: Mapping[str, tuple[str, ...]]) -> None:
    """Kernels that nothing failed for and that are not ready all the same."""
    left_alone = {o.step.release for o in outcomes if isinstance(o.step, Leave)}  # has said why
    for release, reasons in unready.items():
        if release not in left_alone:
            typer.echo(f"{release}: done, but not ready: {'; '.join(reasons)} (gpuguard status)")


def say_outcome(outcome: Outcome) -> None:
    """What became of a step; a failure goes to stderr."""
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
            typer.echo(step_text(outcome.step))
