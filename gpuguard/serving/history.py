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
        for start in entry.get("starts") or ()
        if start.get("seconds") is not None
    ]
    name = lane_id.rpartition("-")[0]
    own = [start for start in starts if start.get("lane") == lane_id]
    namesakes = [s for s in starts if str(s.get("lane")).rpartition("-")[0] == name]
    for among in (own, namesakes):
        alike = [s["seconds"] for s in among if bool(s.get("first")) is first]
        # where only first starts are known, a later one takes at most as long
        known = (alike or [s["seconds"] for s in among])[-_LAST:]
        if known:
            return float(statistics.median(known))
    return None


def duration_text(seconds: float) -> str:
    """``45 s``, ``6 min 30 s``."""
    whole = round(seconds)
    if whole < 120:  # noqa: PLR2004 - a minute and a half is better told in seconds
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s"
