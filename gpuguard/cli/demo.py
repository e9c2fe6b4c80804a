"""``gpuguard demo``."""

from __future__ import annotations

import typer


def demo(ctx: typer.Context) -> None:
    """Watch the incident and its repair on a simulated host; needs no GPU and no root."""
    del ctx
