"""Collect figures with their bound and method; medians of repeated runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure: what, value, bound ("at most" if given), and the runs behind it."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    runs: Sequence[float] = ()
    method: str = ""

    @property
    def reached(self) -> bool:
        """True if there is no bound or the value is within it."""
        return self.bound is None or self.value <= self.bound


@dataclass(slots=True)
class Figures:
    """All figures of a run."""

    rows: list[Figure] = field(default_factory=list)

    def add(
        self,
        name: str,
        runs: Sequence[float],
        unit: str,
        *,
        bound: float | None = None,
        method: str = "",
        worst: bool = False,
    ) -> None:
        """Add the median of runs (or the worst of them, for memory)."""
        value = max(runs) if worst else statistics.median(runs)
        figure = Figure(name=name, value=value, unit=unit, bound=bound, runs=runs, method=method)
        self.rows.append(figure)

    @property
    def all_reached(self) -> bool:
        """True if no figure falls short."""
        return all(figure.reached for figure in self.rows)

    def markdown(self) -> str:
        """A table, then the methods."""
        lines = ["| what | value | at most | runs |", "| --- | --- | --- | --- |"]
        for row in self.rows:
            bound = "" if row.bound is None else f"{row.bound:g} {row.unit}"
            verdict = "" if row.reached else " **falls short**"
            runs = ", ".join(f"{run:.3g}" for run in row.runs)
            lines.append(f"| {row.name} | {row.value:.3g} {row.unit}{verdict} | {bound} | {runs} |")
        lines += ["", "## Method", ""]
        lines += [f"- **{row.name}**: {row.method}" for row in self.rows if row.method]
        return "\n".join(lines) + "\n"
