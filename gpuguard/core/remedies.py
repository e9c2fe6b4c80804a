"""What an operator can do about a kernel that is not ready."""

from __future__ import annotations

from collections.abc import Mapping

from gpuguard.core.facts import HeadersState, HostFacts, KernelFacts
from gpuguard.core.findings import Severity
from gpuguard.core.readiness import Obstacle

#: For facts that an ordinary user may not read; root sees why in the message.
LOOK_AGAIN = "as an ordinary user: sudo gpuguard status; as root: the reason is in the message"

Judged = Mapping[str, tuple[Obstacle, ...]]


def remedy_of(kernel: KernelFacts, obstacle: Obstacle, facts: HostFacts, judged: Judged) -> str:
    """One line: commands first, then which kernel to boot until it is done."""
    if obstacle.code == "secure-boot-key-not-enrolled":
        return f"mokutil --import {facts.secure_boot.certificate}, then confirm at the next boot"
    if obstacle.remedy:
        return obstacle.remedy
    if obstacle.severity is Severity.UNKNOWN:
        return LOOK_AGAIN
    advice = keep_booting(kernel.release, judged) if kernel.release == facts.next.release else ""
    return "; ".join(filter(None, (_command(kernel, obstacle), advice)))


def after_failure(kernel: KernelFacts, judged: Judged) -> str:
    """What to do when a build has failed and its inputs are still the same."""
    again = f"mend the cause, then: {_rebuild(kernel, force=True)}"
    return "; ".join(filter(None, (again, keep_booting(kernel.release, judged))))


def keep_booting(release: str, judged: Judged) -> str:
    """The newest other kernel that is ready, or nothing."""
    ready = [other for other, found in judged.items() if not found and other != release]
    return f"until then boot {ready[-1]}, which is ready" if ready else ""


def _command(kernel: KernelFacts, obstacle: Obstacle) -> str:
    if not obstacle.rebuildable or kernel.headers.state is HeadersState.PRESENT:
        if obstacle.rebuildable and kernel.failure is not None:
            return "the last build failed, see below"
        again = _rebuild(kernel, force=False)
        if kernel.left_alone is None:
            return again
        return f"{again} (rolled back on {kernel.left_alone}: automatic runs leave it alone)"
    package = kernel.headers.package or f"linux-headers-{kernel.release}"
    if kernel.headers.state is HeadersState.MISSING:
        return f"its headers are missing: apt install {package}, then gpuguard rebuild"
    why = f"incomplete (without {', '.join(kernel.headers.missing)})"
    if kernel.headers.release not in (None, kernel.release):
        why = f"those of {kernel.headers.release}"
    return f"its headers are {why}: apt install --reinstall {package}, then gpuguard rebuild"


def _rebuild(kernel: KernelFacts, *, force: bool) -> str:
    return f"gpuguard rebuild {'--force ' if force else ''}--kernel {kernel.release}"
