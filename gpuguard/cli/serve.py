"""``gpuguard serve``."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Annotated

import typer

from gpuguard.cli.context import Context

_LISTEN = re.compile(r"(\[[0-9A-Fa-f:]+\]|[^:\[\]]+):\d{1,5}")


def serve(
    ctx: typer.Context,
    *,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="ADDRESS:PORT",
            help="Listen here, whatever the configuration says.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Observe the host and serve its metrics: the daemon of gpuguard.service.

    /metrics for Prometheus, / for a person, /-/healthy and /-/ready for monitors. Looks every
    serve.interval_seconds and when something changes; a scrape looks at nothing. SIGHUP reads
    the configuration again; a broken one is refused and the old one stays.
    """
    context: Context = ctx.obj
    if listen is not None and not _LISTEN.fullmatch(listen):
        raise typer.BadParameter(f"{listen}: give ADDRESS:PORT, as 127.0.0.1:9838 or [::1]:9838")
    wanted = {"root": str(context.host.root), "config_file": context.config_file, "listen": listen}
    # -P, -S: nothing from the working directory; the path is given, so site has nothing to do
    path = os.pathsep.join(entry for entry in sys.path if entry)
    os.execve(  # noqa: S606 - there is no shell
        sys.executable,
        [sys.executable, "-P", "-S", "-m", "gpuguard.cli.daemon", json.dumps(wanted)],
        {**os.environ, "PYTHONPATH": path},
    )
