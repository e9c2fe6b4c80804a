"""A judged host as series: kernels, modules, driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpuguard.core.assess import Assessment
from gpuguard.core.document import kernel_of, roles_of
from gpuguard.core.facts import HostFacts, Identity, KernelFacts, ModuleFile
from gpuguard.core.findings import Finding, Severity, Verdict
from gpuguard.core.metrics import Sample, sample, stateset
from gpuguard.core.readiness import expected_modules

REBOOT_REASONS = ("kernel", "modules", "userland")


def verdict_samples(verdict: Verdict, findings: Iterable[Finding]) -> Iterator[Sample]:
    """The host in one word, and how much is wrong."""
    yield from stateset("gpuguard_verdict", tuple(Verdict), verdict)
    found = [finding.severity for finding in findings]
    for severity in Severity:
        yield sample("gpuguard_findings", found.count(severity), severity)


def kernel_problem(facts: HostFacts, assessment: Assessment) -> str | None:
    """Why readiness cannot be told; None: it can."""
    if not any(kernel.image for kernel in facts.kernels):
        return "no installed kernel was found"
    if facts.next.release is None:
        return f"which kernel boots next could not be told: {facts.next.reason}"
    for kernel in _in_use(facts):
        if kernel.problem is not None:
            return f"{kernel.release}: {kernel.problem}"
        unknown = [o for o in assessment.obstacles[kernel.release] if o.severity == "unknown"]
        others = len(assessment.obstacles[kernel.release]) - len(unknown)
        if unknown and not others:  # it may be ready, or not
            return f"{kernel.release}: {unknown[0].message}"
    return None


def kernel_samples(facts: HostFacts, assessment: Assessment) -> Iterator[Sample]:
    """Readiness by role, modules of the kernels in use, and the reboot."""
    installed = [kernel.release for kernel in facts.kernels if kernel.image is not None]
    ready = sum(map(assessment.is_ready, installed))
    yield sample("gpuguard_kernels", ready, "true")
    yield sample("gpuguard_kernels", len(installed) - ready, "false")
    for kernel in facts.kernels:
        if kernel.image is not None:
            failed = kernel.failure is not None and not assessment.is_ready(kernel.release)
            yield sample("gpuguard_kernel_build_failed", failed, kernel.release)
    for kernel in _in_use(facts):
        for role in roles_of(kernel.release, facts):
            value = assessment.is_ready(kernel.release)
            yield sample("gpuguard_kernel_ready", value, kernel.release, role)
        yield from _module_samples(kernel)
    if facts.next.release is not None and kernel_of(facts, facts.next.release) is None:
        yield sample("gpuguard_kernel_ready", 0, facts.next.release, "next")  # not installed
    for reason in REBOOT_REASONS:
        yield sample("gpuguard_reboot_required", reason in assessment.reboot.causes, reason)
    yield sample("gpuguard_reboot_safe", assessment.reboot.safe)


def driver_problem(facts: HostFacts, assessment: Assessment) -> str | None:
    """Why it cannot be told what is loaded; None: it can, or nothing is."""
    if facts.driver.problem is not None:
        return facts.driver.problem
    if assessment.loaded_identity == "unknown":
        return "a driver is loaded, but its build-id could not be read"
    return None


def driver_samples(facts: HostFacts, assessment: Assessment) -> Iterator[Sample]:
    """The loaded module; nothing where none is loaded but that it is not."""
    driver = facts.driver
    yield sample(
        "gpuguard_driver_info", 1, driver.loaded or "", driver.userland or "", driver.flavour or ""
    )
    if assessment.loaded_identity in ("none", "unknown"):
        return
    build_id = driver.loaded_build_id or ""
    yield sample(
        "gpuguard_module_info", 1, "nvidia", driver.loaded or "", build_id,
        _signer(facts, build_id),
    )  # fmt: skip
    is_ours = assessment.loaded_identity == "patched"
    yield sample("gpuguard_module_patched", is_ours, "nvidia", facts.running or "", "loaded")


def _in_use(facts: HostFacts) -> Iterator[KernelFacts]:
    for kernel in facts.kernels:
        if kernel.image is not None and roles_of(kernel.release, facts):
            yield kernel


def _module_samples(kernel: KernelFacts) -> Iterator[Sample]:
    ours = {build_id for record in kernel.records for _, build_id in record.build_ids}
    wanted = expected_modules(kernel)
    for module in kernel.modules:
        if module.name not in wanted:
            continue
        is_ours = module.identity is Identity.PATCHED
        yield sample("gpuguard_module_patched", is_ours, module.name, kernel.release, "disk")
        hidden = any(file.build_id in ours for file in module.others if file.build_id)
        yield sample(
            "gpuguard_module_shadowed", not is_ours and hidden, module.name, kernel.release
        )
    bases = {m.file.base_name: m.name for m in kernel.modules if m.file is not None}
    inside: dict[str, bool] = {}
    for base, build_id in kernel.initramfs.modules:
        name = bases.get(base, base)
        inside[name] = inside.get(name, True) and build_id in ours
    for name, is_ours in sorted(inside.items()):
        yield sample("gpuguard_module_patched", is_ours, name, kernel.release, "initramfs")


def _signer(facts: HostFacts, build_id: str) -> str:
    """Of the file that is loaded, where it is still on the disk."""
    for file in _files(kernel_of(facts, facts.running)):
        if file.build_id == build_id and file.signer:
            return file.signer
    return ""


def _files(kernel: KernelFacts | None) -> Iterator[ModuleFile]:
    for module in kernel.modules if kernel is not None else ():
        if module.file is not None:
            yield module.file
        yield from module.others
