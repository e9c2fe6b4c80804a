"""Swap the loaded modules for the patched ones on disk, without a reboot: the decision.

Facts in; a plan, "nothing to do" or a refusal out. A driver that anybody uses is never
unloaded: the kernel would refuse it anyway, but halfway through (CASES C16).
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuguard.core.facts import (
    DriverFacts,
    Identity,
    KernelFacts,
    ModuleFile,
    ResolvedModule,
    SecureBootFacts,
)
from gpuguard.core.readiness import obstacles

#: Users before what they use.
UNLOAD_ORDER = ("nvidia-drm", "nvidia-modeset", "nvidia-uvm", "nvidia-peermem", "nvidia")
LOAD_ORDER = ("nvidia", "nvidia-modeset", "nvidia-drm", "nvidia-uvm", "nvidia-peermem")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModule:
    """One module of the driver in the running kernel.

    ``references`` None: this kernel does not count them, so it cannot unload modules.
    ``users`` are the modules that use it, by canonical name where it is one of the driver's.
    """

    name: str
    build_id: str | None
    references: int | None = 0
    users: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has a device of the cards open; ``unit`` as its control group says."""

    pid: int
    name: str
    devices: tuple[str, ...]
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadFacts:
    """What the decision needs; ``kernel`` is the running one, None if its tree is not there."""

    release: str | None
    kernel: KernelFacts | None
    driver: DriverFacts
    secure_boot: SecureBootFacts
    loaded: tuple[LoadedModule, ...]
    holders: tuple[Holder, ...] = ()
    modules_disabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload:
    """Take a module out of the kernel."""

    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load what modprobe resolves under a name; it must then have this build-id."""

    module: str
    path: str
    build_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OldFile:
    """The file on disk of a module that is loaded now, to put it back; None: there is none."""

    module: str
    path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why nothing is done; ``is_busy``: it may work later, else something has to change."""

    code: str
    message: str
    hint: str
    is_busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadPlan:
    """Empty actions and no refusal: the right modules are loaded."""

    release: str
    actions: tuple[Unload | Load, ...] = ()
    old: tuple[OldFile, ...] = ()
    refusal: Refusal | None = None


def plan_reload(facts: ReloadFacts) -> ReloadPlan:
    """Decide; a refusal for use still carries the actions, so that they can be shown."""
    release = facts.release or ""
    refusal = _no_candidate(facts)
    if refusal is not None or facts.kernel is None:
        return ReloadPlan(release=release, refusal=refusal)
    disk = {module.name: module for module in facts.kernel.modules}
    if all(_is_loaded(module, disk[module.name]) for module in facts.loaded):
        return ReloadPlan(release=release)
    refusal = _not_fit(facts, facts.kernel) or _in_use(facts)
    return ReloadPlan(
        release=release,
        actions=_actions(facts.loaded, disk),
        old=tuple(_old_file(module, disk[module.name]) for module in facts.loaded),
        refusal=refusal,
    )


def _is_loaded(module: LoadedModule, disk: ResolvedModule) -> bool:
    return (
        module.build_id is not None
        and disk.file is not None
        and (module.build_id == disk.file.build_id)
    )


def _no_candidate(facts: ReloadFacts) -> Refusal | None:
    if not facts.loaded:
        return Refusal(
            code="driver-not-loaded",
            message="no module of the driver is loaded, so there is nothing to swap",
            hint="modprobe -a nvidia nvidia-uvm",
        )
    if facts.kernel is None or facts.kernel.problem is not None:
        why = facts.kernel.problem if facts.kernel else "its tree in /lib/modules is not there"
        return Refusal(
            code="no-module-tree",
            message=f"the modules of the running kernel {facts.release or ''} are not known: {why}",
            hint="run it on the host itself, not in a container",
        )
    disk = {module.name: module for module in facts.kernel.modules}
    stock = [m.name for m in facts.loaded if disk[m.name].identity is not Identity.PATCHED]
    if stock:
        return Refusal(
            code="not-patched-on-disk",
            message=f"modprobe would not load a patched module for {', '.join(stock)}",
            hint=f"gpuguard rebuild --kernel {facts.release}, then gpuguard reload",
        )
    return None


def _not_fit(facts: ReloadFacts, kernel: KernelFacts) -> Refusal | None:
    """New modules that would not load, or a kernel that does not let go of the old ones."""
    # the initramfs counts at the next boot only
    found = [
        obstacle
        for obstacle in obstacles(kernel, facts.driver, facts.secure_boot)
        if not obstacle.code.startswith("initramfs")
    ]
    if found:
        return Refusal(
            code="kernel-not-ready",
            message=f"the modules on disk would not do: {'; '.join(o.message for o in found)}",
            hint=f"gpuguard rebuild --kernel {kernel.release}; see gpuguard status",
        )
    if facts.modules_disabled:
        return Refusal(
            code="modules-disabled",
            message="this kernel loads no more modules (kernel.modules_disabled = 1)",
            hint="reboot; gpuguard status says whether that is safe",
        )
    if any(module.references is None for module in facts.loaded):
        return Refusal(
            code="unload-not-supported",
            message="this kernel does not count who uses a module, so it cannot unload any",
            hint="reboot; gpuguard status says whether that is safe",
        )
    return None


def _in_use(facts: ReloadFacts) -> Refusal | None:
    if facts.holders:
        units = sorted({h.unit for h in facts.holders if h.unit.endswith(".service")})
        stop = f"systemctl stop {' '.join(units)}, then try again" if units else "end them"
        count = len(facts.holders)
        return Refusal(
            code="cards-in-use",
            message=f"{count} process{'es hold' if count > 1 else ' holds'} the cards; "
            "nothing changed",
            hint=stop if units else f"{stop} and try again, or reboot",
            is_busy=True,
        )
    for module in facts.loaded:
        foreign = [user for user in module.users if user not in UNLOAD_ORDER]
        unexplained = (module.references or 0) - len(module.users)
        if foreign:
            return Refusal(
                code="cards-in-use",
                message=f"the module {foreign[0]} uses {module.name}; nothing changed",
                hint=f"modprobe -r {foreign[0]}, then try again",
                is_busy=True,
            )
        if unexplained > 0:
            return Refusal(
                code="cards-in-use",
                message=f"{module.name} is used {unexplained} times by somebody that cannot be "
                "seen: the console, or a process of another namespace; nothing changed",
                hint="is the console on one of these cards (nvidia-drm with fbdev=1)? then reboot",
                is_busy=True,
            )
    return None


def _actions(
    loaded: tuple[LoadedModule, ...], disk: dict[str, ResolvedModule]
) -> tuple[Unload | Load, ...]:
    names = {module.name for module in loaded}
    unload = [Unload(module=name) for name in UNLOAD_ORDER if name in names]
    files = [(name, disk[name].file) for name in LOAD_ORDER if name in names]
    load = [
        Load(module=name, path=file.path, build_id=file.build_id)
        for name, file in files
        if file is not None
    ]
    return (*unload, *load)


def _old_file(module: LoadedModule, disk: ResolvedModule) -> OldFile:
    files: list[ModuleFile] = [*([disk.file] if disk.file else []), *disk.others]
    same = (f.path for f in files if f.build_id is not None and f.build_id == module.build_id)
    return OldFile(module=module.name, path=next(same, None))
