"""What a shell offers for words of ``gpuguard lane``: read only, and silent about what fails."""

from __future__ import annotations

from contextlib import suppress

import typer

from gpuguard.errors import GpuguardError
from gpuguard.host import LocalHost
from gpuguard.serving.lane_file import lane_names

PRESETS = ("int4", "fp8", "bf16", "dense27b")


def complete_lanes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Declared lanes, of the tree that ``--root`` names."""
    with suppress(GpuguardError, OSError):
        root = ctx.find_root().params.get("root") or "/"
        return [name for name in lane_names(LocalHost(root)) if name.startswith(incomplete)]
    return []


def complete_presets(incomplete: str) -> list[str]:
    """Presets."""
    return [name for name in PRESETS if name.startswith(incomplete)]
