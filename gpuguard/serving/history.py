"""How long a start takes, judged by the lane's own history. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

_LAST = 5


def expected_seconds(
    history: Iterable[Mapping[str, Any]], lane_id: str, *, first: bool
) -> float | None:
    """Median of the last starts of this lane, first ones and later ones apart.

    A lane that was changed has no history of its own yet: then that of its name. None: no start
    of it was ever seen.
    """
    starts = [
        start
        for entry in history
        for start in entry.get("starts", ())
        if start.get("seconds") is not None and bool(start.get("first")) is first
    ]
    own = [start["seconds"] for start in starts if start.get("lane") == lane_id]
    name = lane_id.rpartition("-")[0]
    namesakes = [s["seconds"] for s in starts if str(s.get("lane")).rpartition("-")[0] == name]
    known = (own or namesakes)[-_LAST:]
    return statistics.median(known) if known else None


def duration_text(seconds: float) -> str:
    """``45 s``, ``6 min 30 s``."""
    whole = round(seconds)
    if whole < 120:  # noqa: PLR2004 - a minute and a half is better told in seconds
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s"
