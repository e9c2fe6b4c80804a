"""A maintenance window in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from gpuguard.cli.render import coloured, shown, table
from gpuguard.cli.steps import outcome_document
from gpuguard.core.boot_default import Pinning
from gpuguard.core.findings import Verdict
from gpuguard.core.upgrade import MENDING, Change, Refusal, Trial
from gpuguard.core.withheld import days_between
from gpuguard.errors import GpuguardError
from gpuguard.verbs.clock import now
from gpuguard.verbs.upgrade import Report
from gpuguard.verbs.upgrade_preflight import Preflight
from gpuguard.window import Phase, Window, window_document


def preflight_text(preflight: Preflight) -> str:
    """What apt would do and whether the window may open."""
    upgrade = preflight.upgrade
    lines: list[str] = []
    if not upgrade.changes and not preflight.refusals:
        lines.append("nothing to upgrade; the holds stay as they are")
    if upgrade.changes:
        lines.append(changes_text(upgrade.changes))
    lines += [_trial_text(trial) for trial in preflight.trials]
    if preflight.trials and not preflight.wish.build:
        lines.append("no build was tried (--no-build): whether the modules compile is not known")
    if preflight.foreign:
        lines.append(f"left alone, held by others: {', '.join(preflight.foreign)}")
    now = "safe" if preflight.safe_now else "not safe"
    lines.append(f"next boot as it is now: {preflight.facts.next.release or 'unknown'}, {now}")
    lines.append(f"apt's lists were fetched: {lists_age(preflight.lists_updated)}")
    lines += [_refusal_text(refusal) for refusal in preflight.refusals]
    return "\n".join(lines)


def lists_age(updated: str | None) -> str:
    """``2026-11-29T18:00:00Z, 3 days ago``: a plan is as good as the lists it was made from."""
    if updated is None:
        return "never, or nobody knows when; run apt-get update before"
    days = days_between(updated, now())
    return f"{updated}, {days} day{'' if days == 1 else 's'} ago" if days else updated


def changes_text(changes: Sequence[Change]) -> str:
    """A table: package, old version, new version."""
    rows = [(change.name, change.old or "-", change.new or "(removed)") for change in changes]
    return table([list(map(shown, row)) for row in (("package", "installed", "new"), *rows)])


def report_text(report: Report) -> str:
    """How a window ended, and what is left to do."""
    window = report.window
    lines = []
    if window.outcome == "interrupted":
        number = len(report.installed)
        lines.append(
            f"the window was stopped; installed: {number} of {len(window.changes)} packages"
        )
    if report.unfinished:
        lines += ["half installed or half configured:"]
        lines += [f"  | {shown(line)}" for line in report.unfinished.splitlines()]
        lines += ["  -> to finish it:", *(f"  -> {line}" for line in MENDING.splitlines())]
    if report.holds is not None:
        lines.append(f"on hold again: {len(report.holds.held)} packages")
    if window.reboot_safe is not None:
        safe = coloured("safe", Verdict.OK) if window.reboot_safe else _not_safe()
        lines.append(f"next boot: {window.next_release or 'unknown'}, {safe}")
    lines += [f"  {shown(reason)}" for reason in window.reasons]
    if report.settled is not None and report.settled.pinning is Pinning.PIN:
        lines.append(
            f"the boot default is kept on {report.settled.release}: {report.settled.reason}"
        )
    if window.outcome == "interrupted" and (window.phase is Phase.WAITING or report.unfinished):
        lines.append("still to do: gpuguard rebuild, which builds what is missing")
    if window.phase is Phase.WAITING:
        lines.append("still to do: reboot; the gate then closes this window's record")
    return "\n".join(lines)


def windows_text(windows: Sequence[Window]) -> str:
    """One line for each window."""
    if not windows:
        return "no maintenance window so far"
    rows = [["window", "state", "packages", "next boot", "after the boot"]]
    for window in windows:
        state = window.outcome or window.phase.value
        if window.phase is Phase.WAITING:
            state += ", waits for its boot"
        rows.append([
            window.id, state, str(len(window.changes)), window.next_release or "-",
            window.verdict or "-",
        ])  # fmt: skip
    return table(rows)


def preflight_document(preflight: Preflight) -> dict[str, Any]:
    """The plan as JSON; see docs/json.md."""
    upgrade = preflight.upgrade
    return {
        "schema": 1,
        "nothing_to_do": preflight.is_empty,
        "requested": list(upgrade.requested),
        "packages": _changes(upgrade.changes),
        "new_kernels": list(upgrade.new_kernels),
        "removed_kernels": list(upgrade.removed_kernels),
        "driver_version": upgrade.driver_version,
        "foreign_holds": list(preflight.foreign),
        "lists_updated": preflight.lists_updated,
        "reboot_now": {"next": preflight.facts.next.release, "safe": preflight.safe_now},
        "builds_tried": preflight.wish.build,
        "builds": [
            {
                "release": trial.release,
                "required": trial.is_required,
                "ok": trial.was_built if preflight.wish.build else None,
                "problem": _refusal(trial.refusal) if trial.refusal is not None else None,
            }
            for trial in preflight.trials
        ],
        "refusals": [_refusal(refusal) for refusal in preflight.refusals],
    }


def report_document(preflight: Preflight, report: Report) -> dict[str, Any]:
    """The plan and what became of it, as JSON; see docs/json.md."""
    return {
        **preflight_document(preflight),
        "window": window_document(report.window),
        "steps": [outcome_document(outcome, report.unready) for outcome in report.outcomes],
        "held_again": list(report.holds.held) if report.holds is not None else None,
        "installed": _changes(report.installed),
        "unfinished": report.unfinished,
        "boot_default": None
        if report.settled is None
        else {
            "action": report.settled.pinning.value,
            "release": report.settled.release,
            "reason": report.settled.reason,
        },
        "reboot": {
            "next": report.window.next_release,
            "safe": report.window.reboot_safe,
            "reasons": list(report.window.reasons),
            "waiting": report.window.phase is Phase.WAITING,
        },
        "errors": [
            {
                "code": error.code,
                "message": error.message,
                "hint": error.hint,
                "detail": error.detail,
                "exit_status": error.exit_status,
            }
            for error in (report.error, *report.problems)
            if error is not None
        ],
    }


def say_error(error: GpuguardError) -> None:
    """What failed, on stderr, as the program's own errors look."""
    typer.echo(f"gpuguard: {error.message} [{error.code}]", err=True)
    for line in error.detail.splitlines():
        typer.echo(f"  | {shown(line)}", err=True)
    for line in error.hint.splitlines():
        typer.echo(f"  -> {line}", err=True)


def _changes(changes: Sequence[Change]) -> list[dict[str, str | None]]:
    return [{"name": c.name, "old": c.old, "new": c.new} for c in changes]


def _refusal(refusal: Refusal) -> dict[str, Any]:
    return {
        "code": refusal.code,
        "message": refusal.message,
        "hint": refusal.hint,
        "detail": refusal.detail,
        "exit_status": refusal.exit_status,
    }


def _trial_text(trial: Trial) -> str:
    if trial.refusal is not None:
        note = "" if trial.is_required else " (it does not boot next)"
        return f"{trial.release}: {trial.refusal.message} [{trial.refusal.code}]{note}"
    if not trial.was_built:
        return f"{trial.release}: the patched modules are to be built"
    how = "before" if trial.seconds is None else f"in {trial.seconds:.0f} s"
    return f"{trial.release}: the patched modules are built, {how}"


def _refusal_text(refusal: Refusal) -> str:
    lines = [f"{coloured('REFUSED', Verdict.CRITICAL)} {refusal.message} [{refusal.code}]"]
    lines += [f"  | {shown(line)}" for line in refusal.detail.splitlines()]
    lines += [f"  -> {line}" for line in refusal.hint.splitlines()]
    return "\n".join(lines)


def _not_safe() -> str:
    return coloured("NOT safe", Verdict.CRITICAL)
