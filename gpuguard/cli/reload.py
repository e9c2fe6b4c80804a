"""``gpuguard reload``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gpuguard.apply.reload import state_text
from gpuguard.cli.context import Context
from gpuguard.cli.session import changing
from gpuguard.config_file import read_config
from gpuguard.core.assess import Assessment
from gpuguard.core.reload import ReloadFacts, ReloadPlan, Unload
from gpuguard.errors import UsageError, VerifyError
from gpuguard.verbs.reload import carry_out, decide, refused


def reload(
    ctx: typer.Context,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be done, and stop.")
    ] = False,
) -> None:
    """Swap the loaded modules for the patched ones on disk, without a reboot.

    Only if nothing holds the cards: else those who do are listed and nothing changes (exit
    status 75). If the new modules do not load, the old ones are loaded again.
    """
    context: Context = ctx.obj
    config = read_config(context.host, context.config_file)
    if dry_run:
        facts, plan = decide(context.host, config)
        _show_plan(context, facts, plan)
        if plan.refusal is not None:
            raise refused(plan.refusal, facts) if not context.json else _exit(plan, facts)
        return
    if not context.host.is_live:
        raise UsageError(
            "only modules of the running system can be reloaded, not those of a directory tree",
            code="live-only",
            hint="with --root there is --dry-run",
        )
    with changing(context, config.lock_timeout_seconds if config else 60.0):
        facts, plan = decide(context.host, config)
        if plan.refusal is not None:
            raise refused(plan.refusal, facts)
        if not plan.actions:
            _say(context, plan, "nothing-to-do", "the right modules are loaded; nothing to do")
            return
        report = _quiet if context.json else typer.echo
        found = carry_out(context.host, config, plan, report)
    _conclude(context, plan, found)


def _conclude(context: Context, plan: ReloadPlan, found: Assessment) -> None:
    words = {True: "every pair has P2P", False: "P2P is NOT there", None: "P2P is unknown"}
    word = words[found.p2p_healthy]
    loaded = state_text(context.host)
    _say(context, plan, "reloaded", f"the patched modules are loaded: {loaded}; {word}", found)
    if found.p2p_healthy is False:
        # The modules are those that were asked for: putting the old ones back would not help.
        error = VerifyError(
            "the patched modules are loaded, and P2P is not granted",
            code="reload-without-p2p",
            hint="gpuguard verify names the pairs, gpuguard doctor the causes",
        )
        raise error if not context.json else typer.Exit(error.exit_status)


def _show_plan(context: Context, facts: ReloadFacts, plan: ReloadPlan) -> None:
    if context.json:
        context.print_json(_document(plan, "planned" if plan.actions else "nothing-to-do", facts))
        return
    for line in _lines(plan):
        typer.echo(line)
    if not plan.actions and plan.refusal is None:
        typer.echo("the right modules are loaded; nothing to do")


def _exit(plan: ReloadPlan, facts: ReloadFacts) -> typer.Exit:
    """One object has been printed; only the status is left to be told."""
    assert plan.refusal is not None  # noqa: S101 - typing only
    return typer.Exit(refused(plan.refusal, facts).exit_status)


def _lines(plan: ReloadPlan) -> list[str]:
    return [
        f"unload {action.module}"
        if isinstance(action, Unload)
        else f"load   {action.module} from {action.path}"
        for action in plan.actions
    ]


def _say(
    context: Context,
    plan: ReloadPlan,
    outcome: str,
    text: str,
    found: Assessment | None = None,
) -> None:
    if not context.json:
        typer.echo(text)
        return
    document = _document(plan, outcome, None)
    if found is not None:
        document["p2p_healthy"] = found.p2p_healthy
        document["loaded"] = state_text(context.host)
    context.print_json(document)


def _document(plan: ReloadPlan, outcome: str, facts: ReloadFacts | None) -> dict[str, Any]:
    refusal = plan.refusal
    return {
        "schema": 1,
        "release": plan.release,
        "outcome": "refused" if refusal is not None else outcome,
        "actions": [_action(action) for action in plan.actions],
        "refusal": None
        if refusal is None
        else {"code": refusal.code, "message": refusal.message, "hint": refusal.hint},
        "holders": [
            {"pid": h.pid, "name": h.name, "devices": list(h.devices), "unit": h.unit or None}
            for h in (facts.holders if facts else ())
        ],
    }


def _action(action: Any) -> dict[str, Any]:
    if isinstance(action, Unload):
        return {"action": "unload", "module": action.module}
    return {
        "action": "load",
        "module": action.module,
        "path": action.path,
        "build_id": action.build_id,
    }


def _quiet(_line: str) -> None:
    return None
