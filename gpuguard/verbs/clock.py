"""Timestamps as records carry them."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """RFC 3339, UTC, whole seconds: ``2026-11-29T18:00:00Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
