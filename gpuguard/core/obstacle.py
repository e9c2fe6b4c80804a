"""Why a kernel is not ready: the shape of every answer of ``readiness`` and its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuguard.core.findings import Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """One reason why a kernel is not ready; ``rebuildable`` if new modules would remove it.

    ``remedy`` is what to do about it where that is neither a rebuild nor looking as root.
    """

    code: str
    message: str
    rebuildable: bool = True
    severity: Severity = Severity.WARNING
    evidence: dict[str, str] = field(default_factory=dict)
    remedy: str = ""
