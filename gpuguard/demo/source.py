"""Copies of the stand-in source tree that ships with gpuguard, and of its patch."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from gpuguard.demo.headers import source_dir
from gpuguard.host import LocalHost

#: The stand-in for NVIDIA's open module source; read only, copy it to build.
STANDIN = Path(__file__).parent / "standin"
#: Applies to it with ``patch -p1 --fuzz=0``: core object and kernel-open both change.
P2P_PATCH = Path(__file__).parent / "patches" / "p2p.patch"
#: The version that the stand-in carries.
VERSION = "999.10.01"
CORE_OBJECTS = {
    "nvidia": "src/nvidia/_out/Linux_x86_64/nv-kernel.o",
    "nvidia-modeset": "src/nvidia-modeset/_out/Linux_x86_64/nv-modeset-kernel.o",
}


def copy_standin(target: Path, *, version: str = VERSION) -> Path:
    """Copy the stand-in to a folder that is not there yet, if wanted as another version.

    As in NVIDIA's tree the version stands in two places: the core objects take it from
    ``version.mk``, the modules from ``kernel-open/Kbuild``.
    """
    shutil.copytree(STANDIN, target)
    for name in ("version.mk", "kernel-open/Kbuild"):
        file = target / name
        file.write_text(re.sub(re.escape(VERSION), version, file.read_text()))
    return target


def build_core(source: Path, *, compiler: str = "gcc") -> None:
    """Compile both core objects of a copy, as its top-level makefile would."""
    for module in CORE_OBJECTS:
        LocalHost().run(
            "make", "-C", str(source / "src" / module), f"-j{os.cpu_count() or 1}",
            f"CC={compiler}", "TARGET_OS=Linux", "TARGET_ARCH=x86_64",
            timeout=120,
        )  # fmt: skip


def apply_patch(source: Path, patch: Path = P2P_PATCH) -> None:
    """Apply a patch to a copy; it must fit without fuzz."""
    # --forward: with --batch, patch would take out one that is in already, and exit 0
    LocalHost().run(
        "patch", "-p1", "--fuzz=0", "--forward", "-d", str(source), "-i", str(patch), timeout=60
    )


def build_modules(source: Path, headers: Path, release: str) -> Path:
    """Compile core objects and modules of a copy for one kernel; the folder with the ``.ko``.

    Args:
        source: a copy of the stand-in, patched or not.
        headers: root below which the kernel's headers lie (a cache, a host tree).
        release: the kernel.
    """
    build_core(source)
    folder = source / "kernel-open"
    for module, core in CORE_OBJECTS.items():
        link = folder / module / f"{Path(core).name}_binary"
        link.unlink(missing_ok=True)
        link.symlink_to(f"../../{core}")
    LocalHost().run(
        "make", "-C", str(folder), f"-j{os.cpu_count() or 1}", "modules",
        f"SYSSRC={headers / source_dir(headers, release)}",
        f"SYSOUT={headers / 'usr/src' / f'linux-headers-{release}'}",
        f"KERNEL_UNAME={release}",
        timeout=600,
    )  # fmt: skip
    return folder
