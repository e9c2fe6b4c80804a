"""Would a boot into this kernel give working P2P, as far as files can tell."""

from __future__ import annotations

from collections.abc import Iterator

from gpuguard.core.facts import (
    DriverFacts,
    Identity,
    InitramfsState,
    KernelFacts,
    ModuleFile,
    ResolvedModule,
    SecureBootFacts,
)
from gpuguard.core.findings import Severity
from gpuguard.core.obstacle import Obstacle as Obstacle  # noqa: PLC0414 - asked for here
from gpuguard.core.signatures import signature_obstacles
from gpuguard.core.upgrade import MENDING


def obstacles(
    kernel: KernelFacts, driver: DriverFacts, secure_boot: SecureBootFacts
) -> tuple[Obstacle, ...]:
    """Every reason why a kernel is not ready; empty means ready."""
    if kernel.problem is not None:
        return (
            Obstacle(
                code="modules-undetermined",
                message=f"its modules could not be resolved: {kernel.problem}",
                severity=Severity.UNKNOWN,
            ),
        )
    return (
        *_unconfigured(kernel),
        *_blocked(kernel),
        *_identity(kernel),
        *_files(kernel),
        *_versions(kernel, driver),
        *_initramfs(kernel),
        *signature_obstacles(kernel, secure_boot),
    )


def expected_modules(kernel: KernelFacts) -> frozenset[str]:
    """What our newest build for this kernel made; before any build, what resolves, and nvidia."""
    if kernel.records:
        return frozenset(name for name, _ in kernel.records[-1].build_ids)
    return frozenset({"nvidia", *(m.name for m in kernel.modules if m.file is not None)})


def _unconfigured(kernel: KernelFacts) -> Iterator[Obstacle]:
    if kernel.unconfigured is not None:
        yield Obstacle(
            code="kernel-unconfigured",
            message=f"its package is {kernel.unconfigured}: its initramfs may be missing, and what "
            "its scripts do",
            rebuildable=False,
            remedy="dpkg --configure -a; if that fails, because of the package it names, or with "
            f"dependency problems: {'; '.join(MENDING.splitlines())}",
        )


def _blocked(kernel: KernelFacts) -> Iterator[Obstacle]:
    by_kernel = ""
    for word in (kernel.command_line or "").split():
        if word.startswith("module_blacklist="):
            by_kernel = word  # the last one counts (kernel/module/main.c)
    names = by_kernel.partition("=")[2].split(",")
    for module in kernel.modules:
        if module.name not in expected_modules(kernel):
            continue
        if module.name.replace("-", "_") in names:
            yield Obstacle(
                code="module-blocked",
                message=f"its command line has {by_kernel}: it will not load {module.name}",
                rebuildable=False,
                remedy="take the word out (/etc/default/grub, then update-grub; or the entry)",
            )
        elif module.blocked is not None:
            yield Obstacle(
                code="module-blocked",
                message=f"modprobe will not load {module.name}: {module.blocked}",
                rebuildable=False,
                remedy="take the line out: grep -r nvidia /etc/modprobe.d /usr/lib/modprobe.d",
            )


def _identity(kernel: KernelFacts) -> Iterator[Obstacle]:
    wanted = [module for module in kernel.modules if module.name in expected_modules(kernel)]
    missing = [m.name for m in wanted if m.identity is Identity.MISSING and m.blocked is None]
    stock = [m for m in wanted if m.identity is Identity.STOCK]
    if missing:
        yield Obstacle(
            code="modules-missing", message=f"no module would be loaded for {', '.join(missing)}"
        )
    shadowed = [m for m in stock if _our_copy(m, kernel) is not None]
    if shadowed:
        module = shadowed[0]
        ours = _our_copy(module, kernel)
        yield Obstacle(
            code="patched-shadowed",
            message=f"the patched {module.name} is on disk, but modprobe would load another copy",
            evidence={
                "loaded": module.file.path if module.file else "",
                "patched": ours.path if ours else "",
            },
        )
    elif stock:
        first = stock[0].file
        yield Obstacle(
            code="modules-stock",
            message=f"stock modules would be loaded ({', '.join(m.name for m in stock)}): no P2P",
            evidence={"path": first.path, "build_id": first.build_id or "none"} if first else {},
        )


def _our_copy(module: ResolvedModule, kernel: KernelFacts) -> ModuleFile | None:
    ours = {build_id for record in kernel.records for _, build_id in record.build_ids}
    return next((file for file in module.others if file.build_id in ours), None)


def _files(kernel: KernelFacts) -> Iterator[Obstacle]:
    for file in (module.file for module in kernel.modules):
        if file is None:
            continue
        if file.problem is not None:
            yield Obstacle(
                code="module-unreadable",
                message=f"{file.path} {file.problem}",
                evidence={"path": file.path},
            )
        elif file.vermagic is not None and file.vermagic.split(" ", 1)[0] != kernel.release:
            yield Obstacle(
                code="vermagic-mismatch",
                message=f"{file.path} was built for {file.vermagic.split(' ', 1)[0]}",
                evidence={"path": file.path, "vermagic": file.vermagic},
            )


def _versions(kernel: KernelFacts, driver: DriverFacts) -> Iterator[Obstacle]:
    wanted = expected_modules(kernel)
    files = [(m.name, m.file) for m in kernel.modules if m.file and m.file.version]
    on_disk = {file.version for name, file in files if name in wanted and file.version}
    others = [f"{f.path} ({f.version})" for n, f in files if n not in wanted]
    if len({file.version for _, file in files}) > 1:
        versions = sorted({file.version or "" for _, file in files})
        differ = len(on_disk) > 1
        yield Obstacle(
            code="module-versions-differ",
            message=f"its modules are of different driver versions: {', '.join(versions)}",
            rebuildable=differ,  # a build makes only those of build.modules
            evidence={} if differ else {"not built by gpuguard": ", ".join(others)},
            remedy=""
            if differ
            else "add them to build.modules, then gpuguard rebuild --force; or remove them",
        )
    elif on_disk and driver.userland is not None and on_disk != {driver.userland}:
        yield Obstacle(
            code="version-mismatch",
            message=(
                f"modules are {next(iter(on_disk))}, the installed userland is {driver.userland}; "
                "NVML and CUDA refuse to work with that"
            ),
            evidence={"userland": driver.userland, "source": driver.userland_source},
        )


def _initramfs(kernel: KernelFacts) -> Iterator[Obstacle]:
    unified = kernel.initramfs.unified
    path = kernel.initramfs.path or unified or "the initramfs"
    remedy = ""
    if unified is not None:
        remedy = f"make {unified} anew: kernel-install add {kernel.release} {kernel.image}"
    if kernel.initramfs.state is InitramfsState.STALE:
        yield Obstacle(
            code="initramfs-stale",
            message=f"{path} carries other NVIDIA modules than modprobe would load",
            rebuildable=False,
            evidence={base: build_id or "none" for base, build_id in kernel.initramfs.modules},
            remedy=remedy,
        )
    elif kernel.initramfs.state is InitramfsState.UNKNOWN:
        yield Obstacle(
            code="initramfs-unknown",
            message=f"{path} could not be looked into: {kernel.initramfs.reason}",
            rebuildable=False,
            severity=Severity.UNKNOWN,
        )
