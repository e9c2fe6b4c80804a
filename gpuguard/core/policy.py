"""What the operator wants, as the decisions need it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Intent: which kernels are looked after, what must be there.

    ``expected_gpus`` None: as many as are seen on the PCI bus.
    """

    ignored_kernels: tuple[str, ...] = ()  # shell patterns on the release
    expected_gpus: int | None = None

    def looks_after(self, release: str) -> bool:
        """True unless the operator excluded this kernel."""
        return not any(fnmatchcase(release, pattern) for pattern in self.ignored_kernels)
