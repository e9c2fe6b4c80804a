"""Compile the kernel modules of an exported tree for one kernel, by that kernel's kbuild."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpuguard.build.make import Make
from gpuguard.build.records import Compiler
from gpuguard.core.facts import KernelFacts
from gpuguard.errors import BuildError, PreflightError


def wanted_modules(tree: Path, configured: Sequence[str]) -> tuple[str, ...]:
    """The configured modules that this source has (older ones have no nvidia-peermem).

    Raises:
        BuildError: ``modules-incomplete``: none of them.
    """
    found = tuple(name for name in configured if _kbuild_file(tree, name).is_file())
    if not found:
        raise BuildError(
            f"the source has none of {', '.join(configured)}",
            hint="check build.modules",
            code="modules-incomplete",
        )
    return found


def build(make: Make, kernel: KernelFacts, compiler: Compiler, modules: Sequence[str]) -> None:
    """Leave ``kernel-open/<module>.ko`` in the staging tree.

    The target is always named: NVIDIA's Makefile falls back to ``uname -r``, which files the
    running kernel's modules under the new one (C22).

    Raises:
        BuildError: it does not compile, or not in time.
    """
    headers, tree = kernel.headers, make.staging.tree
    if headers.build_dir is None or headers.source_dir is None:
        raise PreflightError(f"no headers for {kernel.release}", code="headers-missing")
    excluded = sorted(
        path.parent.name
        for path in (tree / "kernel-open").glob("*/*.Kbuild")
        if path.stem == path.parent.name and path.stem not in modules
    )
    make.run(
        "modules",
        f"compiling the modules for {kernel.release}",
        (
            "-C", str(tree / "kernel-open"), "modules",
            f"SYSSRC={make.host.path(headers.source_dir)}",
            f"SYSOUT={make.host.path(headers.build_dir)}",
            f"KERNEL_UNAME={kernel.release}",
            f"CC={compiler.cc}",
            "IGNORE_CC_MISMATCH=1",
            *([f"NV_EXCLUDE_KERNEL_MODULES={' '.join(excluded)}"] if excluded else []),
        ),
    )  # fmt: skip


def _kbuild_file(tree: Path, module: str) -> Path:
    return tree / "kernel-open" / module / f"{module}.Kbuild"
