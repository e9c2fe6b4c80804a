"""How a build tells a person where it is; rendering is the caller's."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the steps of a build. Calls may come from another thread: do not block."""

    def step(self, name: str, detail: str, estimate_seconds: float | None) -> None:
        """A step begins.

        Args:
            name: stable word: source, patches, core, modules, check.
            detail: for people: "to be built because the compiler changed".
            estimate_seconds: how long earlier runs took; None: no run to go by.
        """

    def tick(self, fraction: float | None, text: str) -> None:
        """The step goes on; fraction (0 to 1) of it is done, None: cannot be told."""


class Silent:
    """For callers that show nothing."""

    def step(self, name: str, detail: str, estimate_seconds: float | None) -> None:
        """Nothing."""

    def tick(self, fraction: float | None, text: str) -> None:
        """Nothing."""
