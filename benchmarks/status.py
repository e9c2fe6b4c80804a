"""`gpuguard status` on 10 kernels with 5 modules each, cold and warm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from benchmarks.figures import Figures
from benchmarks.process import Measured, run
from tests import toys

_KERNELS = tuple(f"6.8.0-{abi}-generic" for abi in range(90, 100))
_ROUNDS = 7


def measure(figures: Figures) -> None:
    """Plain and zstd-compressed modules; cold: no cache of ours, page cache dropped."""
    for suffix, words in (("", "plain .ko"), (".zst", ".ko.zst")):
        with tempfile.TemporaryDirectory(prefix="gpuguard-bench-") as folder:
            root = Path(folder)
            _make_tree(root, suffix)
            cold = [_status(root, cold=True) for _ in range(_ROUNDS)]
            warm = [_status(root, cold=False) for _ in range(_ROUNDS)]
        method = f"10 kernels, 5 modules each ({words}), {_ROUNDS} runs, whole process"
        figures.add(
            f"status, cold, {words}: wall",
            [m.seconds for m in cold],
            "s",
            bound=1.0,
            method=f"{method}; before each run our cache is removed and the page cache dropped",
        )
        figures.add(
            f"status, cold, {words}: peak memory",
            [m.peak_mib for m in cold],
            "MiB",
            bound=60,
            method="VmHWM of the Python process",
            worst=True,
        )
        figures.add(f"status, nothing changed, {words}: wall", [m.seconds for m in warm], "s")


def _make_tree(root: Path, suffix: str) -> None:
    for release in _KERNELS:
        toys.toy_kernel(root, release)
        toys.stock_modules(root, release, suffix=suffix)
    toys.set_next(root, _KERNELS[-1])
    toys.set_running(root, _KERNELS[0])


def _status(root: Path, *, cold: bool) -> Measured:
    if cold:
        shutil.rmtree(root / "var/cache", ignore_errors=True)
        subprocess.run(["sync"], check=True)
        with suppress(OSError):  # root only; otherwise the page cache stays warm
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
    command = [sys.executable, "-m", "gpuguard", "--root", str(root), "status"]
    done = run(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)})
    assert done.exit_status == 1, done.output  # stock modules: not healthy, but looked at
    return done
