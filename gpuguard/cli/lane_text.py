"""What ``gpuguard lane`` prints: text for people, one object for machines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

import typer
import yaml

from gpuguard.cli.context import Context
from gpuguard.cli.render import coloured, shown
from gpuguard.core.findings import Verdict
from gpuguard.errors import PreflightError, RollbackError, VerifyError
from gpuguard.serving.history import duration_text
from gpuguard.serving.lane import NAME_RULE, Lane, lane_document, unit_of
from gpuguard.serving.lanes import Intent
from gpuguard.serving.machine import Outcome
from gpuguard.serving.render import render
from gpuguard.serving.status import LanesStatus
from gpuguard.serving.steps import Steps
from gpuguard.serving.switching import Result
from gpuguard.verbs.setup import program_of

_EXIT = {
    Outcome.PROMOTED: os.EX_OK,
    Outcome.REFUSED: PreflightError.exit_status,
    Outcome.ROLLED_BACK: VerifyError.exit_status,
    Outcome.FELL_BACK: VerifyError.exit_status,
    Outcome.FAILED: RollbackError.exit_status,
}


_TIERS = {
    "none": "not shown since this boot",
    "grant": "granted by the driver, not proven by bytes",
    "bytes": "proven by bytes since this boot",
}


def list_rows(rows: Iterable[dict[str, Any]]) -> list[list[str]]:
    """Rows of ``lane list``."""
    table = [["lane", "state", "backend", "longest request", "P2P", "id"]]
    for row in rows:
        if row["lane_id"] is None:
            table.append([row["name"], row["state"] or "-", "cannot be used", "-", "-", "-"])
            continue
        known = (row.get("backend"), row.get("max_model_len"), row.get("p2p"), row["lane_id"])
        cells = ["-" if cell is None else str(cell) for cell in known]
        table.append([row["name"], row["state"] or "-", *cells])
    return table


def say_ignored(files: Iterable[str]) -> None:
    """Files that are no lanes because of their names."""
    for file in files:
        typer.echo(
            f"warning: {shown(file)} is not read: a lane's file is NAME.yaml; a name: {NAME_RULE}",
            err=True,
        )


def show_document(context: Context, lane: Lane) -> dict[str, Any]:
    """A lane, and the files made from it."""
    files = [dataclasses.asdict(file) for file in render(lane, (program_of(context.host),))]
    return {
        "schema": 1,
        "lane_id": lane.lane_id,
        "sha256": lane.sha256,
        "lane": lane_document(lane),
        "files": files,
    }


def show_text(context: Context, lane: Lane, *, rendered: bool) -> str:
    """A lane as YAML with every default, or the files made from it."""
    if rendered:
        files = render(lane, (program_of(context.host),))
        return "\n".join(f"# {file.path}\n{file.text}" for file in files)
    body = yaml.safe_dump(lane_document(lane), sort_keys=False, allow_unicode=True, width=100)
    return f"# {lane.lane_id}\n{body}"


def intent_document(intent: Intent) -> dict[str, Any]:
    """What a switch would do."""
    switch = intent.switch
    return {
        "schema": 1,
        "outcome": "nothing-to-do" if switch is None else "planned",
        "to": intent.release.release_id,
        "from": None if switch is None else switch.old,
        "fallbacks": [] if switch is None else list(switch.chain),
        "first_start": intent.first,
        "expected_start_seconds": intent.seconds,
        "refusals": [dataclasses.asdict(refusal) for refusal in intent.refusals],
        "notes": list(intent.notes),
    }


def say_intent(intent: Intent) -> None:
    """The plan of a dry run."""
    if intent.switch is None:
        typer.echo(f"{intent.release.release_id} serves already; nothing to do")
        _say_refusals(intent)
        return
    old = intent.switch.old or "nothing"
    typer.echo(f"stop {old}, start {intent.release.release_id}")
    if intent.switch.chain:
        typer.echo(f"  if neither is good: {', '.join(intent.switch.chain)}")
    guess = "no earlier start is known" if intent.seconds is None else ""
    typer.echo(f"  start: {guess or 'about ' + duration_text(intent.seconds or 0.0)}")
    for note in intent.notes:
        typer.echo(f"  note: {shown(note)}")
    _say_refusals(intent)


def _say_refusals(intent: Intent) -> None:
    for refusal in intent.refusals:
        typer.echo(f"refused: {shown(refusal.message)} [{refusal.code}]")
        typer.echo(f"  -> {shown(refusal.remedy)}")


def say_result(context: Context, result: Result, steps: Steps, *, quiet: bool = False) -> int:
    """How a switch ended; the exit status."""
    status = _EXIT[result.outcome]
    if status == os.EX_OK and steps.front_problem is not None:
        status = PreflightError.exit_status  # it serves, and nobody can reach it
    if quiet:
        return status
    if context.json:
        refused = [dataclasses.asdict(refusal) for refusal in steps.refusals]
        context.print_json({"schema": 1, **result.entry, "refusals": refused})
        return status
    switch = result.switch
    for note in switch.notes:
        typer.echo(f"note: {shown(note)}", err=True)
    if result.outcome is Outcome.PROMOTED:
        typer.echo(f"{result.serving} serves")
        return status
    if steps.refusals and result.outcome is Outcome.REFUSED:
        for refusal in steps.refusals:
            typer.echo(f"gpuguard: {shown(refusal.message)} [{refusal.code}]", err=True)
            typer.echo(f"  -> {shown(refusal.remedy)}", err=True)
    else:
        for reason in switch.reasons:
            typer.echo(f"gpuguard: {shown(reason)}", err=True)
    typer.echo(_ending(result), err=True)
    return status


def _ending(result: Result) -> str:
    if result.outcome is Outcome.REFUSED:
        now = (
            f"{result.serving} serves as before" if result.serving else "nothing serves, as before"
        )
        return f"gpuguard: refused; nothing was stopped, {now} [lane-refused]"
    if result.outcome is Outcome.FAILED:
        return (
            "gpuguard: NO LANE SERVES: every candidate failed, clients get 503 "
            "[lane-all-failed]\n  -> gpuguard lane history; gpuguard lane rollback starts the "
            "last good one again"
        )
    how = "back on" if result.outcome is Outcome.ROLLED_BACK else "fell back to"
    unit = unit_of(result.switch.new.rpartition("-")[0])
    since = result.switch.started.replace("T", " ").replace("Z", " UTC")  # as systemd 252 takes it
    return (
        f"gpuguard: {how} {result.serving} [lane-switch-failed]\n"
        f"  -> see why: journalctl -u {unit} --since '{since}'"
    )


def say_notices(notices: Iterable[tuple[str, str, str, str]]) -> None:
    """Severity, code, message, remedy."""
    for severity, code, message, remedy in notices:
        typer.echo(f"  {severity}: {shown(message)} [{code}]")
        if remedy:
            typer.echo(f"    -> {shown(remedy)}")


def status_document(seen: LanesStatus) -> dict[str, Any]:
    """``lane status --json``."""
    unit, switch = seen.unit, seen.switch
    return {
        "schema": 1,
        "verdict": seen.verdict,
        "active": seen.active.lane_id,
        "since": seen.active.since or None,
        "previous": seen.active.rollback_target,
        "ready": seen.ready,
        "unit": None if unit is None else {"name": unit.name, "active": unit.active,
                                           "sub": unit.sub, "restarts": unit.restarts},
        "load": dataclasses.asdict(seen.load),
        "front": {
            "listen": seen.listen,
            "open": None if seen.server is None else not seen.server.in_maintenance,
            "port": None if seen.server is None else seen.server.port,
        },
        "p2p": _p2p_document(seen),
        "switch": None if switch is None else {
            "to": switch.new, "from": switch.old, "step": switch.step.value,
            "target": switch.target, "started": switch.started, "running": seen.is_switching,
        },
        "notices": [dataclasses.asdict(notice) for notice in seen.notices],
    }  # fmt: skip


def _p2p_document(seen: LanesStatus) -> dict[str, Any] | None:
    if seen.release is None or seen.p2p is None:
        return None
    wanted = seen.release.lane.requires
    gap = seen.p2p.gap
    return {
        "requires": wanted.p2p,
        "proof": wanted.proof,
        "tier": seen.p2p.tier.value,
        "problem": None if gap is None else gap.problem,
        "off": seen.p2p_is_off,
    }


def _has_cards(seen: LanesStatus) -> bool:
    return seen.release is not None and seen.release.lane.engine.gpus == "all"


def say_status(seen: LanesStatus) -> None:
    """``lane status`` for a person."""
    verdict = Verdict(seen.verdict)
    typer.echo(coloured(f"lanes: {seen.verdict}", verdict))
    if seen.switch is not None and seen.is_switching:
        switch = seen.switch
        typer.echo(f"  switching to {switch.new} since {switch.started}: {switch.step}")
        typer.echo(f"  at work on {switch.target}")
    active = seen.active
    if active.lane_id is not None:
        state = {True: "ready", False: "not ready", None: "readiness unknown"}[seen.ready]
        typer.echo(f"  active    {active.lane_id}, {state}, since {active.since}")
    else:
        typer.echo("  active    none")
    if active.rollback_target is not None:
        typer.echo(f"  rollback  {active.rollback_target}")
    if seen.listen is not None:
        typer.echo(f"  front     {seen.listen}, {_front_state(seen)}")
    if (p2p := _p2p_document(seen)) is not None and _has_cards(seen):
        shown_by = _TIERS[p2p["tier"]]
        typer.echo(f"  P2P       {p2p['requires']}, {shown_by}{', OFF' if p2p['off'] else ''}")
    if seen.load.running is not None:
        load = seen.load
        usage = "" if load.kv_usage is None else f", KV use {load.kv_usage:.0%}"
        typer.echo(
            f"  load      {load.running:.0f} running, {load.waiting or 0:.0f} waiting{usage}"
        )
    say_notices([(n.severity, n.code, n.message, n.remedy) for n in seen.notices])


def _front_state(seen: LanesStatus) -> str:
    if seen.server is not None:
        return "503" if seen.server.in_maintenance else "open"
    is_unknown = any(notice.code == "front-unknown" for notice in seen.notices)
    return "state unknown" if is_unknown else "down"


def history_rows(entries: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Lines of ``lane history``, the newest last."""
    for entry in entries:
        seconds = sum((entry.get("seconds") or {}).values())
        old, new = entry.get("from") or "nothing", entry.get("to")
        took = f", {duration_text(seconds)}" if seconds else ""
        yield f"{entry.get('started')}  {entry.get('kind')} {old} -> {new}: {_how(entry)}{took}"
        yield from (f"    {shown(str(reason))}" for reason in entry.get("reasons", ()))
        yield from (f"    note: {shown(str(note))}" for note in entry.get("notes", ()))


def _how(entry: dict[str, Any]) -> str:
    serving = entry.get("serving")
    return f"{entry.get('outcome')}, {f'{serving} serves' if serving else 'nothing serves'}"
