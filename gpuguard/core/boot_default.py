"""Whether the boot default has to be kept on a kernel that is ready, or may go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from gpuguard.core.facts import BootPin, HostFacts
from gpuguard.core.findings import Finding, Severity
from gpuguard.core.policy import Policy
from gpuguard.core.readiness import obstacles


class Pinning(StrEnum):
    """What to do about the boot default."""

    NONE = "none"  # it is right as it is
    PIN = "pin"  # set it to ``release``
    UNPIN = "unpin"  # take our setting away


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do and why; ``release``: of PIN; ``ready``: what may boot afterwards."""

    pinning: Pinning
    reason: str
    release: str | None = None
    ready: tuple[str, ...] = ()


def decide(facts: HostFacts, policy: Policy, *, may_pin: bool, wanted: bool) -> Decision:
    """Decide about the boot default.

    Args:
        facts: the host, ``boot_pin`` included.
        policy: which kernels are looked after.
        may_pin: this run may set it.
        wanted: False: the configuration says that it is never set.
    """
    judged = {
        kernel.release: obstacles(kernel, facts.driver, facts.secure_boot)
        for kernel in facts.kernels
        if kernel.image is not None
    }
    ready = tuple(release for release, found in judged.items() if not found)
    # a kernel that the operator rolled back is meant to boot as it is
    chosen = {kernel.release for kernel in facts.kernels if kernel.left_alone is not None}
    in_care = [r for r in judged if policy.looks_after(r) and r not in chosen]
    newest_is_ready = bool(in_care) and in_care[-1] in ready
    if facts.boot_pin is not None:
        return _with_pin(facts, facts.boot_pin, ready, wanted=wanted, let_go=newest_is_ready)
    following = facts.next.release
    if following is None or following in ready or following not in in_care:
        return Decision(
            pinning=Pinning.NONE, reason="the next kernel is ready, ignored, or rolled back"
        )
    why = f"{following} is not ready"
    if ready and wanted and may_pin:
        return Decision(pinning=Pinning.PIN, reason=why, release=_last_good(facts, ready))
    return Decision(pinning=Pinning.NONE, reason=why if ready else f"{why}, and no other one is")


def _with_pin(
    facts: HostFacts, pin: BootPin, ready: tuple[str, ...], *, wanted: bool, let_go: bool
) -> Decision:
    if not wanted:
        return Decision(pinning=Pinning.UNPIN, reason="reboot.keep_last_good is never")
    if let_go:
        return Decision(pinning=Pinning.UNPIN, reason="the newest kernel is ready", ready=ready)
    if pin.release in ready or not ready:
        return Decision(pinning=Pinning.NONE, reason="the newest kernel is not ready yet")
    reason = f"{pin.release} is not ready any more"
    return Decision(pinning=Pinning.PIN, reason=reason, release=_last_good(facts, ready))


def pin_findings(facts: HostFacts) -> Iterator[Finding]:
    """The boot default is not the newest kernel, because we have set it."""
    if facts.boot_pin is not None:
        yield Finding(
            code="boot-default-pinned",
            severity=Severity.WARNING,
            subject=facts.boot_pin.release,
            message=f"gpuguard keeps this kernel the boot default ({facts.boot_pin.path}), "
            f"because {facts.boot_pin.why}",
            remedy="make the newest kernel ready: gpuguard rebuild; that also takes it away",
        )


def _last_good(facts: HostFacts, ready: tuple[str, ...]) -> str:
    """The running kernel has shown that it works; else the newest that is ready."""
    return facts.running if facts.running in ready and facts.running else ready[-1]
