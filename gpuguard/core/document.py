"""The machine-readable status, schema 1 (resources/schema/status.schema.json).

Keys keep their names and meaning; more keys may appear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuguard.core.assess import Assessment
from gpuguard.core.facts import HostFacts, KernelFacts, ModuleFile, P2pFacts, ResolvedModule
from gpuguard.core.holds_document import holds_document
from gpuguard.core.policy import Policy
from gpuguard.core.window import window_summary

SCHEMA = 1


def status_document(facts: HostFacts, assessment: Assessment, policy: Policy) -> dict[str, Any]:
    """One object with everything that ``status`` found out and thinks of it."""
    return {
        "schema": SCHEMA,
        "verdict": assessment.verdict.value,
        "findings": [
            {
                "code": finding.code,
                "severity": finding.severity.value,
                "subject": finding.subject,
                "message": finding.message,
                "remedy": finding.remedy,
                "evidence": finding.evidence,
            }
            for finding in assessment.findings
        ],
        "kernels": [
            _kernel(kernel, facts, assessment)
            for kernel in facts.kernels
            if kernel.image is not None
        ],
        "boot_default": _boot_default(facts),
        "window": window_summary(facts.window),
        "next_kernel": {
            "release": facts.next.release,
            "source": facts.next.source,
            "reason": facts.next.reason,
        },
        "driver": _driver(facts, assessment),
        "secure_boot": {
            "state": facts.secure_boot.state.value,
            "certificate": facts.secure_boot.certificate,
            "enrolled": facts.secure_boot.enrolled,
        },
        "dkms": [
            {
                "module": entry.module,
                "version": entry.version,
                "release": entry.release,
                "state": entry.state,
                "remark": entry.remark,
            }
            for entry in facts.dkms
        ],
        "p2p": p2p_document(
            facts.p2p,
            healthy=assessment.p2p_healthy,
            expected=policy.expected.on_bus(facts.pci_gpus).number,
        ),
        "holds": holds_document(assessment.holds),
        "reboot": {
            "required": assessment.reboot.required,
            "safe": assessment.reboot.safe,
            "reasons": list(assessment.reboot.reasons),
        },
    }


def _boot_default(facts: HostFacts) -> dict[str, Any] | None:
    """Our own setting of the boot default, if there is one."""
    pin = facts.boot_pin
    if pin is None:
        return None
    return {"release": pin.release, "loader": pin.loader, "file": pin.path, "reason": pin.why}


def roles_of(release: str, facts: HostFacts) -> list[str]:
    """``running``, ``next``, both or neither."""
    roles = []
    if release == facts.running:
        roles.append("running")
    if release == facts.next.release:
        roles.append("next")
    return roles


def disk_version(kernel: KernelFacts | None) -> str | None:
    """Driver version of the nvidia module that a kernel would load."""
    if kernel is None:
        return None
    nvidia = next((module for module in kernel.modules if module.name == "nvidia"), None)
    return nvidia.file.version if nvidia is not None and nvidia.file is not None else None


def kernel_of(facts: HostFacts, release: str | None) -> KernelFacts | None:
    """The kernel with this release, if its tree is there."""
    return next((kernel for kernel in facts.kernels if kernel.release == release), None)


def _kernel(kernel: KernelFacts, facts: HostFacts, assessment: Assessment) -> dict[str, Any]:
    return {
        "release": kernel.release,
        "roles": roles_of(kernel.release, facts),
        "ready": assessment.is_ready(kernel.release),
        "obstacles": [o.code for o in assessment.obstacles.get(kernel.release, ())],
        "modules": [_module(module) for module in kernel.modules],
        "initramfs": kernel.initramfs.state.value,
        "initramfs_path": kernel.initramfs.path,
        "headers": kernel.headers.state.value,
        "headers_missing": list(kernel.headers.missing),
        "image": kernel.image,
    }


def _module(module: ResolvedModule) -> dict[str, Any]:
    file = module.file
    return {
        "name": module.name,
        "path": file.path if file else None,
        "identity": module.identity.value,
        "build_id": file.build_id if file else None,
        "vermagic": file.vermagic if file else None,
        "version": file.version if file else None,
        "signed": file.signed if file else None,
        "problem": file.problem if file else None,
        "others": [_other(other) for other in module.others],
    }


def _other(file: ModuleFile) -> str:
    return file.path


def _driver(facts: HostFacts, assessment: Assessment) -> dict[str, Any]:
    return {
        "userland": facts.driver.userland,
        "loaded": facts.driver.loaded,
        "loaded_identity": assessment.loaded_identity,
        "loaded_build_id": facts.driver.loaded_build_id,
        "flavour": facts.driver.flavour,
        "source": facts.driver.userland_source or None,
        "on_disk_running": disk_version(kernel_of(facts, facts.running)),
        "on_disk_next": disk_version(kernel_of(facts, facts.next.release)),
    }


def p2p_document(
    p2p: P2pFacts,
    *,
    healthy: bool | None,
    expected: int | None,
    sources: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The object ``p2p``, in status and in verify."""
    answered = [p2p.source] if p2p.source is not None else []
    return {
        "source": p2p.source,
        "sources": answered if sources is None else list(sources),
        "healthy": healthy,
        "problem": p2p.problem,
        "expected_gpus": expected,
        "gpus": [
            {"index": g.index, "uuid": g.uuid, "pci_bus_id": g.pci_bus_id, "name": g.name}
            for g in p2p.gpus
        ],
        "pairs": [
            {"src": pair.src, "dst": pair.dst, "read": pair.read, "write": pair.write}
            for pair in p2p.pairs
        ],
    }
