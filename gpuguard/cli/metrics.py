"""``gpuguard metrics``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gpuguard.cli.context import Context
from gpuguard.core.metrics import sample
from gpuguard.core.observation import encode
from gpuguard.errors import StateError
from gpuguard.exporter.exposition import prometheus_text
from gpuguard.exporter.series import Health, all_samples, note_successes
from gpuguard.host.files import replace_atomically
from gpuguard.verbs.inspect import configured
from gpuguard.verbs.observe import observe

_MODE = 0o644  # node_exporter reads it under an account of its own


def metrics(
    ctx: typer.Context,
    *,
    textfile: Annotated[
        str | None,
        typer.Option(
            "--textfile", metavar="FILE",
            help="Write them here for node_exporter's textfile collector; the name ends in .prom.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Look at the host, and print or write its metrics as Prometheus reads them.

    For hosts that run node_exporter and no daemon. Exit status 0 also where a probe failed:
    that is in the metrics. With --json the observation itself.
    """
    context: Context = ctx.obj
    if textfile is not None:
        _check(textfile)
    config, trouble = configured(context.host, context.config_file)
    observation = observe(context.host, config, trouble)
    if context.json and textfile is None:
        context.print_json(encode(observation))
        return
    health = Health(config_ok=trouble is None, config_read=0.0 if trouble else observation.when)
    note_successes(health, observation)
    samples = list(all_samples(observation, health))
    if textfile is None:
        typer.echo(prometheus_text(samples).decode(), nl=False)
        return
    samples.append(sample("gpuguard_textfile_last_run_timestamp_seconds", time.time()))
    _write(textfile, prometheus_text(samples))


def _check(textfile: str) -> None:
    if not textfile.endswith(".prom"):
        raise typer.BadParameter("node_exporter reads files that end in .prom only")


def _write(textfile: str, text: bytes) -> None:
    from pathlib import Path

    file = Path(textfile).absolute()
    try:
        replace_atomically(file, text, mode=_MODE)
    except OSError as error:
        raise StateError(
            f"{file} cannot be written: {error.strerror}",
            code="textfile-unwritable",
            hint="is it the folder of node_exporter's --collector.textfile.directory, "
            "and is there room?",
        ) from error
