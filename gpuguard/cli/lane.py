"""``gpuguard lane``: look at the lanes, and switch between them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gpuguard.cli import lane_admin
from gpuguard.cli.context import Context
from gpuguard.cli.lane_complete import complete_lanes
from gpuguard.cli.lane_session import Chosen, changing_lanes, intended, require_live
from gpuguard.cli.lane_text import (
    history_rows,
    intent_document,
    list_rows,
    say_ignored,
    say_intent,
    say_notices,
    say_result,
    say_status,
    show_document,
    show_text,
    status_document,
)
from gpuguard.cli.render import shown, table
from gpuguard.cli.session import require_root
from gpuguard.errors import ConfigError, GpuguardError
from gpuguard.serving.front import FrontError
from gpuguard.serving.lane import Lane
from gpuguard.serving.lane_file import ignored_files, lane_names, read_lane, read_lane_file
from gpuguard.serving.lint import errors_of
from gpuguard.serving.machine import LED_BACK
from gpuguard.serving.sight import check_lane
from gpuguard.serving.status import lane_rows, look_at_lanes
from gpuguard.serving.store import read_active, read_history

app = typer.Typer(
    name="lane",
    no_args_is_help=True,
    help="Lanes of the serving stack: one command forward, one command back.",
)
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Say what would be done, and what is in its way.")
]
_SHOWN_HISTORY = 20
_NONE_YET = "no lanes yet; write one with: gpuguard lane init int4"


@app.command("list")
def list_lanes(ctx: typer.Context) -> None:
    """List the lanes that are declared in /etc/gpuguard/lanes, and which one is active."""
    context: Context = ctx.obj
    rows, ignored = lane_rows(context.host), ignored_files(context.host)
    if context.json:
        context.print_json({"schema": 1, "lanes": list(rows), "ignored": list(ignored)})
        return
    typer.echo(table(list_rows(rows)) if rows else _NONE_YET)
    for row in rows:
        if row["problem"] is not None:
            typer.echo(f"  {row['name']}: {shown(row['problem'])}", err=True)
    say_ignored(ignored)


@app.command()
def show(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A lane.", autocompletion=complete_lanes)
    ],
    *,
    rendered: Annotated[
        bool, typer.Option("--rendered", help="Print the files that systemd would get.")
    ] = False,
) -> None:
    """Show one lane with every default, or the unit made from it."""
    context: Context = ctx.obj
    lane = read_lane(context.host, name)
    if context.json:
        context.print_json(show_document(context, lane))
    else:
        typer.echo(show_text(context, lane, rendered=rendered), nl=False)


@app.command()
def validate(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|FILE]...",
            autocompletion=complete_lanes,
            help="Only these; files (absolute paths) need not be in place yet. Default: all.",
        ),
    ] = None,
) -> None:
    """Check lanes: their files, and what would go wrong with them on this host.

    Exit status: 0 fine (warnings are said), 78 a lane cannot be used.
    """
    context: Context = ctx.obj
    lanes, broken = _read_lanes(context, names)
    documents = [*broken]
    also = frozenset(lane.name for lane in lanes.values())
    for one, lane in lanes.items():
        problems = check_lane(context.host, lane, read_history(context.host), also)
        found = errors_of(problems)
        entries = [
            {"code": p.code, "severity": p.severity, "message": p.message, "remedy": p.remedy}
            for p in problems
        ]
        documents.append({"name": one, "valid": not found, "problems": entries, "error": None})
        if not context.json:
            typer.echo(f"{one}: {'refused' if found else 'ok'} ({lane.lane_id})")
            say_notices([(p.severity, p.code, p.message, p.remedy) for p in problems])
    is_bad = not all(document["valid"] for document in documents)
    ignored = () if names else ignored_files(context.host)
    if context.json:
        said = {"valid": not is_bad, "lanes": documents, "ignored": list(ignored)}
        context.print_json({"schema": 1, **said})
    else:
        if not documents:
            typer.echo(_NONE_YET)
        say_ignored(ignored)
    raise typer.Exit(ConfigError.exit_status if is_bad else 0)


def _read_lanes(
    context: Context, names: list[str] | None
) -> tuple[dict[str, Lane], list[dict[str, Any]]]:
    """Lanes by name or file, and what is said of those that are none."""
    lanes, broken = {}, []
    for one in names or lane_names(context.host):
        try:
            lanes[one] = _read(context, one)
        except ConfigError as error:
            said = _error_document(error)
            broken.append({"name": one, "valid": False, "problems": [], "error": said})
            if not context.json:
                _say_broken(one, error)
    return lanes, broken


def _read(context: Context, one: str) -> Lane:
    if one.startswith("/"):
        return read_lane_file(context.host, one)
    if "/" in one or one.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"{one}: no lane's name",
            code="lane-missing",
            hint="give a file by its absolute path (inside the root), a lane by its name",
        )
    return read_lane(context.host, one)


def _error_document(error: GpuguardError) -> dict[str, str]:
    return {name: getattr(error, name) for name in ("code", "message", "hint", "detail")}


def _say_broken(name: str, error: GpuguardError) -> None:
    named = "" if error.message.startswith(f"{name}:") else f"{shown(name)}: "
    typer.echo(f"{named}{shown(error.message)} [{error.code}]", err=True)
    for mark, text in (("|", error.detail), ("->", error.hint)):
        for line in text.splitlines():
            typer.echo(f"  {mark} {shown(line)}", err=True)


@app.command()
def switch(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The lane that is to serve.", autocompletion=complete_lanes
        ),
    ],
    *,
    dry_run: DryRun = False,
) -> None:
    """Stop the active lane, start another one, and go back if that is not good.

    The old lane gets no new requests and time for those it has. The new one must be ready,
    be what its file says, and pass its gate before it gets traffic; else the old one is
    started again, then the fallbacks of the lane file.

    Exit status: 0 done, 69 refused and nothing was stopped, or done and the front cannot be
    told (the message says which), 70 failed and another lane serves, 71 failed and nothing
    serves, 75 another switch is under way.
    """
    _go(ctx.obj, Chosen(name), dry_run=dry_run)


@app.command()
def rollback(ctx: typer.Context, *, dry_run: DryRun = False) -> None:
    """Go back to the lane that served before, exactly as it was then.

    After a switch that failed altogether: start the last good lane. After one that was
    interrupted: bring it to its end, and go back only if that was a new lane. Exit status as of
    switch.
    """
    _go(ctx.obj, Chosen(None), dry_run=dry_run)


def _go(context: Context, chosen: Chosen, *, dry_run: bool) -> None:
    require_live(context)
    if dry_run:
        intent = intended(context, chosen)
        if context.json:
            context.print_json(intent_document(intent))
        else:
            say_intent(intent)
        raise typer.Exit(69 if intent.refusals else 0)
    require_root(context)
    with changing_lanes(context) as lanes:
        interrupted = lanes.finish_interrupted()
        if interrupted is not None:
            result, steps = interrupted
            is_back = chosen.name is None and result.outcome in LED_BACK
            say_result(context, result, steps, quiet=context.json and not is_back)
            if is_back:  # there already: a second step back would be one too far
                raise typer.Exit(0 if steps.front_problem is None else 69)
        intent = chosen.intend(lanes)
        if intent.switch is None:
            lanes.give_traffic(intent.release.lane)
            if context.json:
                context.print_json(intent_document(intent))
            else:
                typer.echo(f"{intent.release.release_id} serves already; nothing to do")
            return
        result, steps = lanes.carry_out(intent)
    raise typer.Exit(say_result(context, result, steps))


@app.command()
def resume(
    ctx: typer.Context,
    *,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end of a switch that is under way.")
    ] = False,
    only_interrupted: Annotated[
        bool, typer.Option("--only-interrupted", help="Do nothing where no switch was interrupted.")
    ] = False,
) -> None:
    """Bring an interrupted switch to its end, and start the active lane if it does not run.

    gpuguard-lane.service does so after a boot, gpuguard-lane-resume.service when the process that
    switches has died. Exit status as of switch; 69 also when the front cannot be told to send
    traffic to the lane.
    """
    context: Context = ctx.obj
    require_live(context)
    require_root(context)
    status = 0
    with changing_lanes(context, wait=wait) as lanes:
        done = lanes.finish_interrupted()
        if done is None and only_interrupted:
            _say_nothing_interrupted(context)
            return
        if done is not None:
            status = say_result(context, *done)
        lane, was_stopped = lanes.start_active()
        problem = lanes.reopen_front()
    lane_id = None if lane is None else lane.lane_id
    if done is None and context.json:
        context.print_json({"schema": 1, "active": lane_id, "front_problem": problem})
    elif done is None:
        how = "is started" if was_stopped else "runs already"
        typer.echo("no lane is active" if lane is None else f"{lane_id} {how}")
    if problem is not None:
        raise FrontError(
            f"{lane_id} gets no traffic: {problem}",
            hint="see to the front, then run gpuguard lane resume again",
        )
    raise typer.Exit(status)


def _say_nothing_interrupted(context: Context) -> None:
    active = read_active(context.host).lane_id
    if context.json:
        context.print_json({"schema": 1, "active": active, "front_problem": None})
    else:
        typer.echo("no switch was interrupted; nothing to do")


@app.command()
def status(ctx: typer.Context) -> None:
    """Show which lane serves, how it is, and what is not as it should be.

    Exit status: 0 fine, 1 not, 3 could not be determined.
    """
    context: Context = ctx.obj
    seen = look_at_lanes(context.host)
    if context.json:
        context.print_json(status_document(seen))
    else:
        say_status(seen)
    raise typer.Exit(seen.exit_status)


@app.command()
def history(
    ctx: typer.Context,
    *,
    number: Annotated[
        int, typer.Option("--number", min=1, help="How many switches, the newest.")
    ] = _SHOWN_HISTORY,
) -> None:
    """List the switches: from where to where, how they ended, and why."""
    context: Context = ctx.obj
    entries = read_history(context.host)[-number:]
    if context.json:
        context.print_json({"schema": 1, "switches": list(entries)})
    elif not entries:
        typer.echo("no switches yet")
    else:
        typer.echo("\n".join(history_rows(entries)))


for _verb in (
    lane_admin.init, lane_admin.manifest, lane_admin.prepare, lane_admin.setup, lane_admin.drain
):  # fmt: skip
    app.command()(_verb)
