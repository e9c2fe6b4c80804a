"""What the operator wants, as the decisions need it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from gpuguard.core.expectation import Expectation
from gpuguard.core.holds import HoldPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Intent: which kernels are looked after, which cards must be there, what is held."""

    ignored_kernels: tuple[str, ...] = ()  # shell patterns on the release
    expected: Expectation = field(default_factory=Expectation)
    holds: HoldPolicy = field(default_factory=HoldPolicy)

    def looks_after(self, release: str) -> bool:
        """True unless the operator excluded this kernel."""
        return not any(fnmatchcase(release, pattern) for pattern in self.ignored_kernels)
