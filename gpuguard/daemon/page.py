"""The page for a person."""

from __future__ import annotations

from gpuguard.core.observation import Observation


def page(observation: Observation | None) -> bytes:
    return b"<!doctype html><title>gpuguard</title>"
