"""Would the kernel take the modules' signatures: Secure Boot, and what else enforces them."""

from __future__ import annotations

from collections.abc import Iterator

from gpuguard.core.facts import (
    Identity,
    KernelFacts,
    ModuleFile,
    SecureBootFacts,
    SecureBootState,
)
from gpuguard.core.findings import Severity
from gpuguard.core.obstacle import Obstacle


def signature_obstacles(kernel: KernelFacts, secure_boot: SecureBootFacts) -> Iterator[Obstacle]:
    """What stands in the way of the modules of one kernel, by their signatures."""
    if secure_boot.state is SecureBootState.ON:
        yield from _under_secure_boot(kernel, secure_boot)
    elif kernel.enforced is not None:
        yield from _enforced(kernel, kernel.enforced, secure_boot)
    elif secure_boot.state is SecureBootState.UNKNOWN:
        yield from _if_it_were_on(kernel, secure_boot)


def _under_secure_boot(kernel: KernelFacts, secure_boot: SecureBootFacts) -> Iterator[Obstacle]:
    unsigned = _unsigned(kernel)
    strange = _untrusted(kernel, secure_boot)
    waiting = [f for f in strange if f.signer in secure_boot.signers]
    foreign = [f for f in strange if f.signer not in secure_boot.signers]
    if unsigned:
        yield Obstacle(
            code="secure-boot-will-reject",
            message=f"Secure Boot is on and {_why(unsigned[0])}: the kernel will reject it",
            evidence={"unsigned": ", ".join(file.path for file in unsigned)},
        )
    elif secure_boot.enrolled is None and strange:
        yield Obstacle(
            code="secure-boot-unknown",
            message="Secure Boot is on, and whether our key is enrolled could not be read",
            rebuildable=False,
            severity=Severity.UNKNOWN,
        )
    elif waiting:
        yield Obstacle(
            code="secure-boot-key-not-enrolled",
            message=f"Secure Boot is on and {secure_boot.certificate} is not enrolled",
            rebuildable=False,
        )
    elif foreign:
        yield Obstacle(
            code="secure-boot-will-reject",
            message=f"Secure Boot is on and {foreign[0].path} is signed by a key that neither the "
            "firmware nor shim knows: the kernel will reject it",
            evidence={
                "signer": foreign[0].signer or "",
                "certificate": secure_boot.certificate or "",
            },
        )


def _enforced(kernel: KernelFacts, why: str, secure_boot: SecureBootFacts) -> Iterator[Obstacle]:
    again = f"signing.mode: always, then gpuguard rebuild --force --kernel {kernel.release}"
    if unsigned := _unsigned(kernel):
        yield Obstacle(
            code="signature-enforced",
            message=f"{why}, and {_why(unsigned[0])}: the kernel will reject it",
            rebuildable=False,  # a rebuild signs if it can; where it cannot, it must not go on
            evidence={"unsigned": ", ".join(file.path for file in unsigned)},
            remedy=f"{again}; the key must be one that the kernel has or that is enrolled",
        )
    elif strange := _untrusted(kernel, secure_boot):
        yield Obstacle(
            code="signature-unknown",
            message=f"{why}, and whether the kernel has the key of {strange[0].path} is not known",
            rebuildable=False,
            severity=Severity.UNKNOWN,
            evidence={"signer": strange[0].signer or ""},
            remedy="try it where a failed boot does no harm: modprobe nvidia; or enrol the key",
        )


def _if_it_were_on(kernel: KernelFacts, secure_boot: SecureBootFacts) -> Iterator[Obstacle]:
    doubtful = [*_unsigned(kernel), *_untrusted(kernel, secure_boot)]
    if doubtful:
        yield Obstacle(
            code="secure-boot-unknown",
            message="whether Secure Boot is on could not be read; if it is, the kernel rejects "
            f"{doubtful[0].path}",
            rebuildable=False,
            severity=Severity.UNKNOWN,
        )


def _unsigned(kernel: KernelFacts) -> list[ModuleFile]:
    return [m.file for m in kernel.modules if m.file is not None and m.file.signer is None]


def _untrusted(kernel: KernelFacts, secure_boot: SecureBootFacts) -> list[ModuleFile]:
    """Signed by a key that is in no list, or in none that could be read.

    A stock module with another signer than ours is left out: the distributor's key is built
    into its kernels, where nobody can look it up.
    """
    return [
        m.file
        for m in kernel.modules
        if m.file is not None and m.file.signer is not None
        if m.file.signer not in secure_boot.trusted
        if m.identity is Identity.PATCHED or m.file.signer in secure_boot.signers
    ]


def _why(file: ModuleFile) -> str:
    return f"{file.path} " + ("has a damaged signature" if file.signed else "is not signed")
