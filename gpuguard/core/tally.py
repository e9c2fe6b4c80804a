"""Builds that ended, by result."""

from __future__ import annotations

from dataclasses import dataclass

RESULTS = ("done", "failed")


@dataclass(frozen=True, slots=True)
class Tally:
    """Builds with one result: how many, when the last one ended (0: never), how long it took."""

    count: int = 0
    last: float = 0.0  # seconds since the epoch
    seconds: float = 0.0
