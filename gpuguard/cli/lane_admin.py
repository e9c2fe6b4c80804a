"""``gpuguard lane`` around the switch: presets, manifests, the front, what units call."""

from __future__ import annotations

import os
from importlib import resources
from typing import Annotated

import typer
import yaml

from gpuguard.cli.context import Context
from gpuguard.cli.lane_complete import PRESETS, complete_presets
from gpuguard.cli.lane_session import changing_lanes, lanes_config, prover_of, require_live
from gpuguard.cli.render import shown
from gpuguard.cli.session import require_root
from gpuguard.errors import ConfigError, StateError, UsageError
from gpuguard.host.notify import journal
from gpuguard.serving import front_setup
from gpuguard.serving import prepare as preparation
from gpuguard.serving.lane import NAME, NAME_RULE
from gpuguard.serving.lane_file import lane_file, lane_names
from gpuguard.serving.manifest import write_manifest
from gpuguard.verbs.setup import program_of


def preset_text(name: str) -> str:
    """A preset's file."""
    return resources.files("gpuguard").joinpath(f"resources/lanes/{name}.yaml").read_text()


def init(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of the new lane.", autocompletion=complete_presets
        ),
    ],
    *,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            help="int4, fp8, bf16 or dense27b; default: as the name.",
            autocompletion=complete_presets,
        ),
    ] = None,
    stdout: Annotated[
        bool, typer.Option("--stdout", help="Print the file, write nothing.")
    ] = False,
) -> None:
    """Write a lane file from a preset; put your image's digest and your model's path into it."""
    context: Context = ctx.obj
    source = preset or name
    if not NAME.fullmatch(name):
        raise UsageError(f"{name}: no lane's name", hint=f"a lane's name: {NAME_RULE}")
    if source not in PRESETS:
        hint = f"gpuguard lane init {name} --preset PRESET; presets: {', '.join(PRESETS)}"
        raise UsageError(f"there is no preset {source}", hint=hint)
    text = preset_text(source).replace(f"\nname: {source}\n", f"\nname: {name}\n")
    if stdout:
        typer.echo(text, nl=False)
        return
    require_root(context)
    file = lane_file(name)
    if os.path.lexists(context.host.path(file, follow=False)):
        raise ConfigError(
            f"{file}: exists, and is left alone",
            code="lane-exists",
            hint="print the preset with --stdout",
        )
    try:
        context.host.replace_file(file, text.encode())
    except OSError as error:
        raise StateError(
            f"{file} cannot be written: {error.strerror}", code="state-unwritable"
        ) from error
    context.output.has_acted = True
    there = lane_names(context.host)
    missing = [one for one in yaml.safe_load(text).get("fallback", ()) if one not in there]
    if context.json:
        context.print_json({"schema": 1, "file": file, "fallback_missing": missing})
    else:
        typer.echo(f"wrote {file}; edit it, then run:\n  gpuguard lane validate {name}")
        if missing:
            typer.echo(
                f"fallback names {', '.join(missing)}: write them, too (gpuguard lane init), or "
                "take them out",
                err=True,
            )


def manifest(
    ctx: typer.Context,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder of a model.")],
) -> None:
    """Hash a model's files, and write the manifest that a lane pins into its folder."""
    context: Context = ctx.obj
    if not folder.startswith("/"):
        hint = "give an absolute path (inside the root)"
        raise UsageError(f"{folder}: no absolute path", hint=hint)

    def progress(text: str) -> None:
        if not context.json:
            typer.echo(text, err=True)

    digest, number = write_manifest(context.host, folder.rstrip("/"), progress)
    context.output.has_acted = True
    if context.json:
        context.print_json({"schema": 1, "manifest_sha256": digest, "files": number})
    else:
        typer.echo(f"manifest_sha256: {digest}")


def prepare(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A lane.")],
) -> None:
    """What a lane's unit runs before each start: decide about P2P from what is proven now.

    Where only a proof by bytes is missing, it is made: that takes at most timeouts.prove seconds.

    Exit status: 0 start it, 69 do not.
    """
    context: Context = ctx.obj
    require_root(context)
    begun: list[str] = []

    def progress(step: str) -> None:
        if not begun:  # one line: the steps are hundreds
            journal(f"lane {name}: {step}")
        begun.append(step)

    done = preparation.prepare(context.host, name, prover_of(context), progress)
    for note in done.notes:
        journal(f"lane {name}: {note}", priority="warning", lane=done.lane_id)
    if context.json:
        document = {"lane_id": done.lane_id, "environment": done.environment}
        context.print_json({"schema": 1, **document, "notes": list(done.notes)})


def drain(ctx: typer.Context) -> None:
    """Take no new requests, and wait for those under way: before a maintenance window.

    Clients get 503 with Retry-After. The lane goes on running; gpuguard lane resume, a switch or
    the next boot gives it traffic again.
    """
    context: Context = ctx.obj
    require_live(context)
    require_root(context)
    with changing_lanes(context) as lanes:
        lane, notes = lanes.drain()
    if context.json:
        lane_id = None if lane is None else lane.lane_id
        context.print_json({"schema": 1, "lane_id": lane_id, "notes": list(notes)})
        return
    typer.echo("no lane is active" if lane is None else f"{lane.lane_id} gets no new requests")
    for note in notes:
        typer.echo(f"note: {shown(note)}", err=True)


def setup(
    ctx: typer.Context,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be written, and stop.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Take the units and the front's file away.")
    ] = False,
    program: Annotated[
        str | None,
        typer.Option("--program", metavar="PATH", help="What the units call, inside the root."),
    ] = None,
) -> None:
    """Install the front (a proxy with one address for all lanes) and the start at boot.

    Nothing is started or stopped: systemctl does that, or the next boot.
    """
    context: Context = ctx.obj
    require_root(context)
    host = context.host
    if remove:
        paths = front_setup.removable(host)
    else:
        config = lanes_config(context)
        called = program_of(host, program)
        files = front_setup.wanted_files(host, config.listen, config.retry_after_seconds, called)
        paths = front_setup.differing(host, files)
    if not dry_run:
        try:
            if remove:
                for path in paths:
                    host.remove_file(path)
            else:
                front_setup.install(host, files, paths)
        except OSError as error:
            raise StateError(
                f"{error.filename} cannot be written: {error.strerror}", code="state-unwritable"
            ) from error
        context.output.has_acted = bool(paths)
    notes = () if remove else front_setup.notes(host)
    for note in () if context.json else notes:
        typer.echo(f"note: {note}", err=True)
    if context.json:
        document = {"changed": list(paths), "dry_run": dry_run, "notes": list(notes)}
        context.print_json({"schema": 1, **document})
    else:
        _say_setup(paths, remove=remove, dry_run=dry_run)


def _say_setup(paths: tuple[str, ...], *, remove: bool, dry_run: bool) -> None:
    word = "remove" if remove else "write"
    for path in paths:
        typer.echo(f"{word:<8} {path}")
    if not paths:
        typer.echo("nothing to do")
    elif not dry_run:
        typer.echo("now run: systemctl daemon-reload")
        if not remove:
            typer.echo(f"and: systemctl start {' '.join(front_setup.TO_START)}")
        else:
            typer.echo(f"and: systemctl stop {' '.join(front_setup.OUR_UNITS)}")
