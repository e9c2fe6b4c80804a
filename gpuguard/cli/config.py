"""``gpuguard config``: write an example, check the configuration, show what is in force."""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import stat
from collections.abc import Iterator
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from gpuguard.cli.context import Context
from gpuguard.config_check import leaf_keys
from gpuguard.config_file import InvalidConfigError, LoadedConfig, load
from gpuguard.config_yaml import Problem, key_text
from gpuguard.errors import ConfigError, PrivilegeError
from gpuguard.host import Host

_SCHEMA = 1

app = typer.Typer(
    name="config", no_args_is_help=True, help="Write, check and show the configuration."
)


def example() -> str:
    """The example configuration: valid, complete, every key with its default."""
    return resources.files("gpuguard").joinpath("resources/gpuguard.yaml.example").read_text()


@app.command()
def init(
    ctx: typer.Context,
    *,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace an existing file; it is kept as FILE.old, FILE.old.2, …"
        ),
    ] = False,
    stdout: Annotated[
        bool, typer.Option("--stdout", help="Print the example, write nothing.")
    ] = False,
) -> None:
    """Write a configuration example in which every key is explained."""
    context: Context = ctx.obj
    if stdout:
        typer.echo(example(), nl=False)
        return
    try:
        kept = _write_example(context, force=force)
    except PermissionError as error:
        raise PrivilegeError(
            f"{context.config_file}: cannot be written: {error.strerror}",
            hint="run as root: sudo gpuguard config init",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{context.config_file}: cannot be written: {error.strerror}", code="config-unwritable"
        ) from error
    context.output.has_acted = True
    if context.json:
        context.print_json({"schema": _SCHEMA, "file": context.config_file, "kept": kept})
    else:
        if kept is not None:
            typer.echo(f"what was there is kept as {kept}")
        typer.echo(f"wrote {context.config_file}; set source.path in it, then run:")
        typer.echo("  gpuguard config validate")


def _write_example(context: Context, *, force: bool) -> str | None:
    host, file, kept = context.host, context.config_file, None
    existing = host.path(file, follow=False)
    if os.path.lexists(existing):
        if not force:
            raise ConfigError(
                f"{file}: exists, and is left alone",
                code="config-exists",
                hint="print the example with --stdout, or replace the file with --force",
            )
        kept = _free_name(host, file)
        host.replace_file(kept, existing)
    host.replace_file(file, example().encode())
    return kept


def _free_name(host: Host, file: str) -> str:
    """FILE.old, or the next number: a second ``--force`` must not lose what the first one kept."""
    names = (f"{file}.old" if n == 1 else f"{file}.old.{n}" for n in count(1))
    return next(name for name in names if not os.path.lexists(host.path(name, follow=False)))


@app.command()
def validate(
    ctx: typer.Context,
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="Check this file and its drop-ins.")
    ] = None,
) -> None:
    """Check the configuration; report all problems at once, each with file and key."""
    context: Context = ctx.obj
    try:
        loaded = load(context.host, _absolute(file) if file else context.config_file)
    except InvalidConfigError as error:
        if not context.json:
            raise
        problems = [dataclasses.asdict(problem) for problem in error.problems]
        context.print_json({"schema": _SCHEMA, "valid": False, "problems": problems})
        raise typer.Exit(error.exit_status) from None
    warnings = list(_warnings(context.host, loaded))
    if context.json:
        found = [dataclasses.asdict(warning) for warning in warnings]
        document = {"schema": _SCHEMA, "valid": True, "files": loaded.files, "warnings": found}
        context.print_json(document)
        return
    typer.echo("\n".join(f"{path}: ok" for path in loaded.files))
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def _may_be_folder(host: Host, path: str) -> bool:
    try:
        return stat.S_ISDIR(host.path(path).stat().st_mode)
    except PermissionError:  # an ordinary user checks: no reason for an alarm
        return True
    except OSError:
        return False


def _warnings(host: Host, loaded: LoadedConfig) -> Iterator[Problem]:
    """What a build will miss. No problems: both may come later than the configuration."""
    source, user = loaded.config.source.path, loaded.config.build.user
    if not _may_be_folder(host, source):
        message = f"{source} is not a folder (yet)"
        yield Problem(loaded.origins["source.path"], "source.path", message)
    try:
        pwd.getpwnam(user)
    except KeyError:
        message = f"there is no account {user} (yet)"
        yield Problem(loaded.origins["build.user"], "build.user", message)


@app.command()
def show(
    ctx: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every value in force, and which file it comes from."""
    context: Context = ctx.obj
    loaded = load(context.host, context.config_file)
    values = _values(loaded)
    if as_json or context.json:
        context.print_json({"schema": _SCHEMA, "files": loaded.files, "values": values})
        return
    width = max(len(f"{key}: {_shown(entry)}") for key, entry in values.items())
    for key, entry in values.items():
        line = f"{key}: {_shown(entry)}"
        typer.echo(f"{line:<{min(width, 60)}}  # {entry['origin']}")


def _absolute(file: str) -> str:
    return str(Path(file).absolute())


def _values(loaded: LoadedConfig) -> dict[str, dict[str, Any]]:
    plain = dataclasses.asdict(loaded.config)
    values = {}
    for path in leaf_keys():
        value: Any = plain
        for part in path:
            value = value[part]
        key = key_text(path)
        values[key] = {"value": value, "origin": loaded.origins[key]}
    return values


def _shown(entry: dict[str, Any]) -> str:
    return json.dumps(entry["value"])
