"""Timestamps as records carry them."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """RFC 3339, UTC, whole seconds: ``2026-11-29T18:00:00Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(stamp: str) -> float:
    """How long ago that was; 0 for what is in the future, or no time at all."""
    try:
        then = datetime.fromisoformat(stamp)
    except ValueError:
        return 0.0
    return max(0.0, (datetime.now(UTC) - then).total_seconds())
