"""``gpuguard demo``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


class Terminal:
    """Shows the story on a terminal, or as plain text."""

    def act(self, title: str, text: str) -> None:
        """A heading and a paragraph."""
        typer.secho(f"\n=== {title} ===", fg=typer.colors.CYAN, bold=True)
        if text:
            typer.echo(text)

    def command(self, line: str) -> None:
        """As a person would have typed it."""
        typer.secho(f"\n$ {line}", bold=True)

    def output(self, line: str) -> None:
        """Indented, so that it stands apart from the narrator."""
        typer.echo(f"  {line}" if line else "")

    def note(self, text: str) -> None:
        """The narrator, in passing."""
        typer.secho(f"  ({text})", dim=True)


def demo(
    *,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Where to play; default: /var/tmp/gpuguard-demo-UID."
        ),
    ] = None,
    cards: Annotated[int, typer.Option(min=2, max=8, help="Simulated cards.")] = 4,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the simulated host for a look around.")
    ] = False,
) -> None:
    """Watch the incident and its repair on a simulated host. Needs no GPU and no root.

    Two real kernels' headers are fetched with apt-get download (nothing is installed), stock
    modules are built by the real dkms, and gpuguard does its real work. Nothing outside the
    folder is changed. Takes about a minute.
    """
    from gpuguard.demo.scenario import play

    # not below a home, which the unprivileged build user could not enter
    place = folder or Path(f"/var/tmp/gpuguard-demo-{os.geteuid()}")  # noqa: S108 - owner is checked
    play(place.absolute(), Terminal(), cards=cards, keep=keep)
