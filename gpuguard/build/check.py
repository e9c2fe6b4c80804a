"""Is a compiled module what was asked for. "make exited with 0" is no evidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpuguard.errors import BuildError, ProbeError
from gpuguard.host.elf import ElfModule, read_module


def all_there(tree: Path, modules: Sequence[str]) -> dict[str, Path]:
    """Where each module lies in the staging tree, by name.

    Raises:
        BuildError: ``modules-incomplete``, naming all that are missing.
    """
    found = {name: tree / "kernel-open" / f"{name}.ko" for name in modules}
    missing = [name for name, path in found.items() if path.is_symlink() or not path.is_file()]
    if missing:
        raise BuildError(
            f"make succeeded but did not make {', '.join(missing)} ({len(modules)} were wanted)",
            hint="all or nothing: modules of two builds do not load together",
            code="modules-incomplete",
        )
    return found


def check_module(path: Path, name: str, release: str, driver_version: str) -> ElfModule:
    """Read a module and compare it with what was asked for.

    Raises:
        BuildError: ``module-unreadable``, ``vermagic-mismatch``, ``module-version-mismatch``,
            ``no-build-id``.
    """
    try:
        with path.open("rb") as file:
            module = read_module(file)
    except ProbeError as error:
        raise BuildError(f"{name}: {error.message}", code="module-unreadable") from error
    vermagic = module.modinfo.get("vermagic", "")
    if vermagic.split(" ", 1)[0] != release:
        raise BuildError(
            f"{name} was compiled for kernel {vermagic.split(' ', 1)[0] or 'unknown'}, "
            f"not for {release}",
            hint="the source ignores SYSSRC and KERNEL_UNAME; check its kernel-open/Makefile",
            code="vermagic-mismatch",
        )
    version = module.modinfo.get("version")
    if version != driver_version:
        raise BuildError(
            f"{name} says version {version or 'none'}, not {driver_version}",
            hint="version.mk and kernel-open/Kbuild of the source disagree",
            code="module-version-mismatch",
        )
    if module.build_id is None:
        raise BuildError(
            f"{name} has no GNU build-id, by which a patched module is told from a stock one",
            hint="the linker was told to leave it out (--build-id=none)",
            code="no-build-id",
        )
    return module
