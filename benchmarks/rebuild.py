"""A rebuild for a second kernel against bare make, on NVIDIA's real source and Debian's kernel."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.figures import Figures
from benchmarks.process import run
from tests import realroot
from tests.realroot import chroot
from tests.test_real_nvidia import _configure

_SOURCE = "/srv/bare"


def measure(figures: Figures, *, rounds: int) -> None:
    """Alternate bare make and gpuguard in one root; core objects in place for both."""
    assert os.geteuid() == 0, "the rebuild benchmark needs root (chroot)"
    cache = realroot.cache_dir()
    lab = realroot.Lab(cache / "apt")
    lab.update()
    parts = realroot.choose_parts(lab.names("linux-headers-6.1.0"))
    assert parts is not None, "the archive no longer has the kernels that this source compiles for"
    realroot.make_root(lab, parts, cache / "realroot")
    source = realroot.nvidia_source(lab, cache / "nvidia-source")
    with (
        tempfile.TemporaryDirectory(prefix="gpuguard-bench-") as folder,
        realroot.working_copy(cache / "realroot", Path(folder)) as root,
    ):
        realroot.install_gpuguard(root)
        _configure(root, source)
        with realroot.mounted(root):
            _compare(figures, root, parts.old, parts.new, rounds)


def _compare(figures: Figures, root: Path, old: str, new: str, rounds: int) -> None:
    started = time.monotonic()
    first = chroot(root, "python3", "-m", "gpuguard", "rebuild", "--kernel", old, timeout=7200)
    from_clean = time.monotonic() - started
    _make_bare_tree(root)
    bare, ours, memory, phases = [], [], [], first.stderr
    for _ in range(rounds):
        bare.append(_bare_make(root, new))
        done = run(_gpuguard(root, new), env=_environment())
        assert done.exit_status == 0, done.output
        ours.append(done.seconds)
        memory.append(done.peak_mib)
        phases = done.output
    figures.add(
        "rebuild for a second kernel, core cached, against bare make",
        [mine / theirs for mine, theirs in zip(ours, bare, strict=True)],
        "x",
        bound=1.10,
        method=(
            f"NVIDIA {realroot.driver_version(root)}, kernel {new}, make -j{os.cpu_count()}; "
            f"{rounds} rounds, bare `make -C kernel-open modules` (clean tree, core objects in "
            "place) and `gpuguard rebuild --force` (export, patch, build, check, strip, sign, "
            "back up, install, depmod, verify) alternating in one root"
        ),
    )
    figures.add("bare make of the kernel part", bare, "s")
    figures.add("gpuguard rebuild, core cached", ours, "s")
    figures.add(
        "gpuguard rebuild from clean, core built too",
        [from_clean],
        "s",
        method="the first rebuild of the run, for another kernel",
    )
    figures.add(
        "rebuild: peak memory of the Python process", memory, "MiB", bound=100, worst=True,
        method="VmHWM, sampled; compilers not counted",
    )  # fmt: skip
    print(phases)


def _gpuguard(root: Path, release: str) -> list[str]:
    return [
        "chroot", str(root), "python3", "-m", "gpuguard", "rebuild", "--force", "--kernel", release,
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "PYTHONPATH": "/opt/gpuguard", "LC_ALL": "C.UTF-8", "HOME": "/root"}


def _make_bare_tree(root: Path) -> None:
    """The same source with the core objects that gpuguard built, as an operator would have it."""
    shutil.copytree(root / "srv/nvidia", root / _SOURCE[1:], symlinks=True)
    core = next((root / "var/cache/gpuguard/core").glob("*/nv-kernel.o")).parent
    for module, name in (("nvidia", "nv-kernel.o"), ("nvidia-modeset", "nv-modeset-kernel.o")):
        target = root / _SOURCE[1:] / "kernel-open" / module / f"{name}_binary"
        shutil.copy(core / name, target)


def _bare_make(root: Path, release: str) -> float:
    make = (
        "make", "-C", f"{_SOURCE}/kernel-open", f"-j{os.cpu_count()}", "CC=gcc-12",
        f"SYSSRC=/lib/modules/{release}/source", f"SYSOUT=/lib/modules/{release}/build",
    )  # fmt: skip
    chroot(root, *make, "clean", check=False)
    started = time.monotonic()
    done = chroot(root, *make, "modules", timeout=7200)
    seconds = time.monotonic() - started
    assert re.search(r"LD \[M\].*nvidia\.ko", done.stdout), done.stdout[-2000:]
    return seconds
