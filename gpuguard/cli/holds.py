"""``gpuguard hold``, ``unhold`` and ``holds``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from gpuguard.cli.context import Context
from gpuguard.cli.render import coloured, findings_text, holds_line, shown, table
from gpuguard.cli.session import changing
from gpuguard.config import Config
from gpuguard.config_file import read_config
from gpuguard.core.findings import Finding, Verdict, verdict_of
from gpuguard.core.hold_plan import HoldPlan
from gpuguard.core.holds import Withheld
from gpuguard.core.holds_document import holds_document, owner_of, packages_document, problem_of
from gpuguard.core.withheld import days_between
from gpuguard.verbs import holds as verbs
from gpuguard.verbs.inspect import configured

_EXIT_STATUS = {Verdict.OK: 0, Verdict.WARNING: 1, Verdict.CRITICAL: 1, Verdict.UNKNOWN: 3}
_DEFAULT_LOCK_SECONDS = 60.0

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PACKAGE]...", help="As dpkg -l and apt-mark showhold print them."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Say what would be changed, and stop.")
]


def hold(ctx: typer.Context, *, packages: Names = None, dry_run: DryRun = False) -> None:
    """Put kernel and driver packages on hold, so that they change in a window only.

    Without a name: all installed packages that holds.packages means, from now on; automatic runs
    then hold again what lost its hold. With names: these besides. Who set a hold is remembered:
    gpuguard never lifts one that it has not set itself.
    """
    context: Context = ctx.obj
    config = read_config(context.host, context.config_file)
    if dry_run:
        _say_plan(context, verbs.preview(context.host, config, packages or None))
        return
    with changing(context, _lock_seconds(config)):
        change = verbs.hold(context.host, config, packages or None)
    _say(context, change)


def unhold(ctx: typer.Context, *, packages: Names = None, dry_run: DryRun = False) -> None:
    """Lift holds that gpuguard set.

    Without a name: all of them, and holding ends. With names: these, which then stay free. A
    hold that somebody else set is refused. For an upgrade use gpuguard upgrade: it holds again.
    """
    context: Context = ctx.obj
    # a broken configuration must not keep packages on hold: only how long to wait is read from it
    config, _ = configured(context.host, context.config_file)
    if dry_run:
        _say_plan(context, verbs.preview(context.host, config, packages or None, lift=True))
        return
    with changing(context, _lock_seconds(config)):
        change = verbs.unhold(context.host, packages or None, timeout=_lock_seconds(config))
    _say(context, change)


def holds(ctx: typer.Context) -> None:
    """Show holds, whose they are, what is wrong with them, and which upgrades they keep away.

    Needs no root and no network. Exit status: 0 fine, 1 a hold is gone, missing, without effect
    or was stepped over, 3 could not be determined.
    """
    context: Context = ctx.obj
    config, trouble = configured(context.host, context.config_file)
    report = verbs.report_holds(context.host, config)
    findings = report.findings if trouble is None else (*report.findings, trouble)
    verdict = verdict_of(findings)
    if context.json:
        context.print_json(_document(report, findings, verdict))
    else:
        typer.echo(_text(report, findings, verdict))
    raise typer.Exit(_EXIT_STATUS[verdict])


def _lock_seconds(config: Config | None) -> float:
    return config.lock_timeout_seconds if config is not None else _DEFAULT_LOCK_SECONDS


def _say_plan(context: Context, plan: HoldPlan) -> None:
    if context.json:
        context.print_json(
            {
                "schema": 1,
                "dry_run": True,
                "held": list(plan.hold),
                "released": list(plan.release),
                "restored": list(plan.restored),
                "foreign": list(plan.foreign),
            }
        )
        return
    for verb, names in (("would hold", plan.hold), ("would lift", plan.release)):
        for name in names:
            typer.echo(f"{verb} {name}")
    if not (plan.hold or plan.release):
        typer.echo("nothing would be changed")
    _say_foreign(plan.foreign)


def _say(context: Context, change: verbs.HoldChange) -> None:
    if context.json:
        lists = {key: list(names) for key, names in asdict(change).items()}
        context.print_json({"schema": 1, "dry_run": False, **lists})
        return
    for name in change.held:
        note = " (it had lost its hold)" if name in change.restored else ""
        typer.echo(f"on hold: {name}{note}")
    for name in change.released:
        typer.echo(f"free: {name}")
    if not (change.held or change.released):
        typer.echo("nothing was changed")
    _say_foreign(change.foreign)


def _say_foreign(names: tuple[str, ...]) -> None:
    if names:
        typer.echo(f"left alone, on hold by somebody else: {', '.join(names)}")


def _document(
    report: verbs.HoldsReport, findings: tuple[Finding, ...], verdict: Verdict
) -> dict[str, Any]:
    return {
        "schema": 1,
        "verdict": verdict.value,
        "findings": [{**asdict(f), "severity": f.severity.value} for f in findings],
        **holds_document(report.state),
        "packages": packages_document(report.facts, report.state),
        "looked": report.withheld.looked,
        "lists_updated": report.withheld.lists_updated,
    }


def _text(report: verbs.HoldsReport, findings: tuple[Finding, ...], verdict: Verdict) -> str:
    parts = [coloured(f"gpuguard: {verdict}", verdict) + f"; {holds_line(report.state)}"]
    if rows := list(_package_rows(report)):
        parts.append(table([["package", "version", "held by", "since", "problem"], *rows]))
    if withheld := report.state.withheld:
        rows = [_withheld_row(one, report.withheld.looked) for one in withheld]
        head = ["upgrade withheld", "installed", "candidate", "security", "for"]
        parts.append(table([head, *rows]))
        updated = report.withheld.lists_updated
        parts[-1] += f"\n  (by the lists that apt fetched last: {updated or 'unknown'})"
    if findings:
        parts.append(findings_text(findings))
    return "\n\n".join(parts)


def _package_rows(report: verbs.HoldsReport) -> Iterator[list[str]]:
    facts, state = report.facts, report.state
    for one in packages_document(facts, state):
        name = one["name"]
        owner = owner_of(name, facts, state) if one["held"] else None
        problem = problem_of(name, state)
        word = "-" if problem is None else coloured(problem, Verdict.WARNING)
        since = (one["since"] or "-")[:10]
        yield [shown(name), shown(one["version"]), owner or "nobody", since, word]


def _withheld_row(one: Withheld, now: str) -> list[str]:
    since = one.security_since if one.security else one.since
    days = "not recorded yet" if since is None else _days(days_between(since, now))
    mark = coloured("security", Verdict.CRITICAL) if one.security else "-"
    return [shown(one.name), shown(one.installed), shown(one.candidate), mark, days]


def _days(number: int) -> str:
    return f"{number} day{'' if number == 1 else 's'}"
