"""Show how a build goes: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time

import typer

_MIN_INTERVAL = 0.1  # seconds between redraws
_WIDTH = 28
_SPARE = 3  # for the terminal's own ^C: a line that wraps is not wiped
_COLUMNS = 80  # of a terminal that does not tell


def worth_saying(estimate_seconds: float | None) -> bool:
    """True for estimates that do not round to nothing."""
    return estimate_seconds is not None and estimate_seconds >= 1.0


class Lines:
    """Plain lines on stderr, one per step: for the journal, pipes and logs."""

    def step(self, name: str, detail: str, estimate_seconds: float | None) -> None:
        """A line per step."""
        about = f" (about {estimate_seconds:.0f} s)" if worth_saying(estimate_seconds) else ""
        typer.echo(f"gpuguard: {name}: {detail}{about}", err=True)

    def tick(self, fraction: float | None, text: str) -> None:
        """Nothing: a journal wants no progress bars."""

    def close(self) -> None:
        """Nothing to tidy."""


class Bar:
    """A bar that redraws itself on a terminal."""

    def __init__(self) -> None:
        self._step = ""
        self._started = 0.0
        self._drawn = 0.0

    def step(self, name: str, detail: str, estimate_seconds: float | None) -> None:
        """Finish the line of the step before, begin a new one."""
        self.close()
        about = f", about {estimate_seconds:.0f} s" if worth_saying(estimate_seconds) else ""
        typer.secho(f"  {name:<9}", fg=typer.colors.CYAN, nl=False, err=True)
        typer.echo(f" {detail}{about}", err=True)
        self._step, self._started = name, time.monotonic()

    def tick(self, fraction: float | None, text: str) -> None:
        """Redraw, at most ten times a second."""
        now = time.monotonic()
        if now - self._drawn < _MIN_INTERVAL:
            return
        self._drawn = now
        elapsed = f"{now - self._started:4.0f} s"
        if fraction is None:
            bar = "·" * _WIDTH
        else:
            done = round(min(max(fraction, 0.0), 1.0) * _WIDTH)
            bar = "█" * done + "░" * (_WIDTH - done)
        line = clipped(f"  {bar} {elapsed}  {text}", _columns() - _SPARE)
        typer.echo(f"\r\x1b[2K{line}", nl=False, err=True)

    def close(self) -> None:
        """Wipe the live line."""
        if self._drawn:
            typer.echo("\r\x1b[2K", nl=False, err=True)
        self._drawn = 0.0


def clipped(text: str, columns: int) -> str:
    """At most so many columns: a line that wraps is not wiped by the next redraw."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    return plain if len(plain) <= columns else plain[: max(columns - 1, 0)] + "…"


def _columns() -> int:
    """Of the terminal behind stderr: stdout may be a file, COLUMNS from before a resize."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except OSError:
        return _COLUMNS


def progress_for_terminal() -> Lines | Bar:
    """A bar if a person watches stderr on a terminal that can wipe a line."""
    can_redraw = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return Bar() if can_redraw else Lines()
