"""Since when an upgrade is withheld: what is seen now, joined with what was seen before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from gpuguard.core.holds import Withheld, WithheldRecord


def dated(
    found: Iterable[Withheld], before: WithheldRecord | None, now: str
) -> tuple[Withheld, ...]:
    """Each upgrade with the time at which it was first seen.

    A newer candidate does not start the time again: the package has been behind since then.
    Another installed version does.
    """
    known = {(one.name, one.installed): one for one in before.packages} if before else {}
    dated_ones = []
    for one in found:
        old = known.get((one.name, one.installed))
        security_since = old.security_since if old is not None else None
        dated_ones.append(
            replace(
                one,
                since=(old.since if old is not None else None) or now,
                security_since=(security_since or now) if one.security else None,
            )
        )
    return tuple(dated_ones)


def known_since(found: Iterable[Withheld], before: WithheldRecord | None) -> tuple[Withheld, ...]:
    """As ``dated``, for those who only look: what nobody recorded has no time."""
    known = {(one.name, one.installed): one for one in before.packages} if before else {}
    return tuple(
        replace(one, since=old.since, security_since=old.security_since if one.security else None)
        if (old := known.get((one.name, one.installed))) is not None
        else one
        for one in found
    )


def days_between(since: str, now: str) -> int:
    """Whole days; a clock that was set back gives 0."""
    try:
        passed = datetime.fromisoformat(now) - datetime.fromisoformat(since)
    except (ValueError, TypeError):
        return 0
    return max(0, passed.days)
