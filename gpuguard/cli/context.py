"""The options before the verb, as every verb gets them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import typer

from gpuguard.cli.output import Output
from gpuguard.host import LocalHost


@dataclass(frozen=True, slots=True)
class Context:
    """Which host, which configuration, for a person or for a machine."""

    host: LocalHost
    config_file: str
    json: bool
    output: Output = field(default_factory=Output)

    def print_json(self, document: Any) -> None:
        """Print one object and nothing else."""
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
