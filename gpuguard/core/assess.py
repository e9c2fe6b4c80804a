"""Facts and policy in, findings out: the decision behind ``status``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuguard.core.automation import automation_findings
from gpuguard.core.boot_default import pin_findings
from gpuguard.core.facts import (
    HostFacts,
    Identity,
    KernelFacts,
    ResolvedModule,
    SecureBootState,
)
from gpuguard.core.findings import Finding, Severity, Verdict, verdict_of
from gpuguard.core.hold_findings import hold_findings
from gpuguard.core.holds import HoldState, hold_state
from gpuguard.core.loaded import loaded_identity
from gpuguard.core.p2p import Grant, driver_not_loaded, p2p_findings, p2p_healthy
from gpuguard.core.policy import Policy
from gpuguard.core.readiness import Obstacle, obstacles
from gpuguard.core.remedies import LOOK_AGAIN, after_failure, remedy_of
from gpuguard.core.stray import stray_findings
from gpuguard.core.window import window_findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Reboot:
    """Whether a reboot is due, and whether it may happen now.

    ``causes`` says why it is due: ``kernel``, ``modules``, ``userland``; ``reasons`` in words, and
    why it is not safe.
    """

    required: bool
    safe: bool
    reasons: tuple[str, ...]
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The host judged. ``obstacles`` maps release to why it is not ready (empty: ready)."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    obstacles: dict[str, tuple[Obstacle, ...]]
    loaded_identity: str  # "patched", "stock", "none", "unknown"
    p2p_healthy: bool | None
    reboot: Reboot
    holds: HoldState = field(default_factory=HoldState)

    def is_ready(self, release: str) -> bool:
        """True if nothing speaks against booting this kernel."""
        return self.obstacles.get(release) == ()


def assess(facts: HostFacts, policy: Policy) -> Assessment:
    """Judge a host. Kernels that the policy ignores are judged only if they run or are next."""
    judged = {
        kernel.release: obstacles(kernel, facts.driver, facts.secure_boot)
        for kernel in facts.kernels
        if kernel.image is not None
    }
    loaded = loaded_identity(facts.driver, facts.running_records())
    grant = Grant(
        p2p=facts.p2p,
        expected=policy.expected.on_bus(facts.pci_gpus),
        on_bus=dict.fromkeys(facts.pci_gpus, ""),
        loaded=loaded,
        flavour=facts.driver.flavour,
    )
    healthy = p2p_healthy(grant)
    holds = hold_state(facts.holds, policy.holds)
    findings = (
        *_host_findings(facts),
        *(f for k in _in_care(facts, policy) for f in _kernel_findings(k, facts, judged)),
        *stray_findings(facts),
        *pin_findings(facts),
        *window_findings(facts.window),
        *_loaded_findings(facts, loaded, granted=healthy is True),
        *_p2p_findings(facts, grant),
        *automation_findings(facts.automation),
        *hold_findings(facts.holds, holds, enforced=policy.holds.enforce),
    )
    return Assessment(
        verdict=verdict_of(findings),
        findings=findings,
        obstacles=judged,
        loaded_identity=loaded,
        p2p_healthy=healthy,
        reboot=_reboot(facts, judged, loaded),
        holds=holds,
    )


def _in_care(facts: HostFacts, policy: Policy) -> Iterator[KernelFacts]:
    for kernel in facts.kernels:
        in_use = kernel.release in (facts.running, facts.next.release)
        if kernel.image is not None and (in_use or policy.looks_after(kernel.release)):
            yield kernel


def _host_findings(facts: HostFacts) -> Iterator[Finding]:
    if not any(kernel.image for kernel in facts.kernels):
        yield Finding(
            code="no-kernels",
            severity=Severity.UNKNOWN,
            subject="host",
            message="no installed kernel was found (an image in /boot and a tree in /lib/modules)",
            remedy="is this the root of a host? point --root at it",
        )
        return
    if facts.interrupted is not None:
        yield Finding(
            code="change-interrupted",
            severity=Severity.CRITICAL,
            subject="gpuguard",
            message=f"{facts.interrupted} was interrupted and has not been cleaned up after",
            remedy="do not reboot; gpuguard rebuild (or rollback) finishes or undoes it first",
        )
    yield from _blacklisted(facts)
    if facts.next.release is None:
        yield Finding(
            code="next-kernel-unknown",
            severity=Severity.UNKNOWN,
            subject="boot loader",
            message=f"which kernel boots next could not be told: {facts.next.reason}",
            remedy=LOOK_AGAIN,
        )
    elif all(k.release != facts.next.release or k.image is None for k in facts.kernels):
        yield Finding(
            code="next-kernel-not-installed",
            severity=Severity.CRITICAL,
            subject=facts.next.release,
            message=f"{facts.next.source} would start a kernel that is not installed",
            remedy="run update-grub, or set the boot default to an installed kernel",
        )
    if facts.secure_boot.state is SecureBootState.UNKNOWN:
        yield Finding(
            code="secure-boot-unknown",
            severity=Severity.UNKNOWN,
            subject="firmware",
            message="whether Secure Boot is on could not be read",
            remedy=LOOK_AGAIN,
        )


def _blacklisted(facts: HostFacts) -> Iterator[Finding]:
    found = [f"{module} ({source})" for module, source in facts.blacklisted]
    for word in (facts.next.command_line or "").split():
        name, _, modules = word.partition("=")
        if name == "modprobe.blacklist" and "nvidia" in modules.split(","):
            found.append(f"nvidia ({word} on the command line)")
    if found:
        yield Finding(
            code="module-blacklisted",
            severity=Severity.WARNING,
            subject="modprobe",
            message="blacklisted, so that no card makes it load at boot; only who asks for it by "
            f"name gets it: {', '.join(found)}",
            remedy="take the line out, unless something else loads it (modules-load.d)",
        )


def _kernel_findings(
    kernel: KernelFacts, facts: HostFacts, judged: dict[str, tuple[Obstacle, ...]]
) -> Iterator[Finding]:
    is_next = kernel.release == facts.next.release
    for obstacle in judged[kernel.release]:
        severity = obstacle.severity
        if is_next and severity is Severity.WARNING:
            severity = Severity.CRITICAL
        prefix = "next-kernel-stock" if is_next and obstacle.code == "modules-stock" else None
        yield Finding(
            code=prefix or obstacle.code,
            severity=severity,
            subject=kernel.release,
            message=obstacle.message,
            remedy=remedy_of(kernel, obstacle, facts, judged),
            evidence=obstacle.evidence,
        )
    if kernel.failure is not None and judged[kernel.release]:
        yield Finding(
            code="build-failed",
            severity=Severity.CRITICAL if is_next else Severity.WARNING,
            subject=kernel.release,
            message=f"the last build failed [{kernel.failure.code}]: {kernel.failure.message}",
            remedy=after_failure(kernel, judged),
            evidence={"when": kernel.failure.created},
        )


def _p2p_findings(facts: HostFacts, grant: Grant) -> Iterator[Finding]:
    if facts.p2p.source is not None or grant.loaded != "none":
        yield from p2p_findings(grant)
    elif facts.running is not None and facts.driver.problem is None:
        # a tree where no kernel runs, a disk at rest, has nothing loaded in any case
        yield from driver_not_loaded(grant)


def _loaded_findings(facts: HostFacts, loaded: str, *, granted: bool) -> Iterator[Finding]:
    driver = facts.driver
    if driver.problem is not None:
        yield Finding(
            code="driver-undetermined",
            severity=Severity.UNKNOWN,
            subject="driver",
            message=f"driver versions could not be read: {driver.problem}",
            remedy=LOOK_AGAIN,
        )
    if driver.flavour == "proprietary":
        yield Finding(
            code="proprietary-driver",
            severity=Severity.CRITICAL,
            subject="driver",
            message="the loaded driver is the proprietary flavour, which cannot be patched for P2P",
            remedy="install the open kernel modules of the same driver version",
        )
    elif loaded == "stock":
        yield Finding(
            code="loaded-stock",
            # NVLink and data-centre cards have P2P with the stock module, too
            severity=Severity.WARNING if granted else Severity.CRITICAL,
            subject="driver",
            message="the loaded nvidia module is not one of our builds"
            + ("; the driver grants P2P all the same" if granted else ": no P2P now"),
            remedy="nothing, if these cards have P2P with the stock module, too (NVLink)"
            if granted
            else _after_loaded_stock(facts),
            evidence={"build_id": driver.loaded_build_id or "", "version": driver.loaded or ""},
        )
    elif loaded == "unknown":
        yield Finding(
            code="loaded-unknown",
            severity=Severity.UNKNOWN,
            subject="driver",
            message="a driver is loaded, but its build-id could not be read",
            remedy="is /sys mounted? see /sys/module/nvidia/notes/.note.gnu.build-id",
        )
    if driver.loaded and driver.userland and driver.loaded != driver.userland:
        yield Finding(
            code="driver-library-mismatch",
            severity=Severity.CRITICAL,
            subject="driver",
            message=f"loaded module {driver.loaded}, userland {driver.userland}",
            remedy="reboot into a kernel that is ready; do not restart GPU programs before",
            evidence={"userland_source": driver.userland_source},
        )


def _after_loaded_stock(facts: HostFacts) -> str:
    disk = _running_nvidia(facts)
    if disk is not None and disk.identity is Identity.PATCHED:
        return "the patched modules are installed for this kernel: reboot to load them"
    return "gpuguard rebuild, then reboot"


def _patched_on_disk_is_another(facts: HostFacts, loaded: str) -> bool:
    """True if a reboot into the running kernel would load a (newer) build of ours instead."""
    disk = _running_nvidia(facts)
    if disk is None or disk.identity is not Identity.PATCHED or disk.file is None:
        return False
    return loaded in ("stock", "patched") and disk.file.build_id != facts.driver.loaded_build_id


def _running_nvidia(facts: HostFacts) -> ResolvedModule | None:
    for kernel in facts.kernels:
        if kernel.release == facts.running:
            return next((m for m in kernel.modules if m.name == "nvidia"), None)
    return None


def _reboot(facts: HostFacts, judged: dict[str, tuple[Obstacle, ...]], loaded: str) -> Reboot:
    due = {}
    if facts.running and facts.next.release and facts.running != facts.next.release:
        due["kernel"] = f"the next boot starts {facts.next.release}, {facts.running} is running"
    driver = facts.driver
    if _patched_on_disk_is_another(facts, loaded):
        due["modules"] = "patched modules are installed, the loaded one is another"
    if driver.loaded and driver.userland and driver.loaded != driver.userland:
        due["userland"] = f"userland is {driver.userland}, the loaded module is {driver.loaded}"
    found = judged.get(facts.next.release or "")
    return Reboot(
        required=bool(due),
        safe=found == () and facts.interrupted is None,
        reasons=(*_not_safe(facts, found), *due.values()),
        causes=tuple(due),
    )


def _not_safe(facts: HostFacts, found: tuple[Obstacle, ...] | None) -> Iterator[str]:
    if facts.interrupted is not None:
        yield f"not safe: {facts.interrupted} was interrupted and waits for its clean-up"
    if found is None:
        yield "not safe: the next kernel is not known"
    for obstacle in found or ():
        yield f"not safe: {facts.next.release}: {obstacle.message}"
