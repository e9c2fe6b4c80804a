"""`gpuguard verify` on 8 simulated cards: wall time, memory of the NVML child, hung tools."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.figures import Figures
from benchmarks.process import run
from gpuguard.demo.driver import LIBRARY_DIR
from gpuguard.errors import CommandTimeoutError
from gpuguard.host import LocalHost
from tests import realroot
from tests.p2pbox import P2pBox, program_environment, simulated_host

_CARDS = 8
_ROUNDS = 9
_DEADLINE = 1.0
_HANGS = {
    "ignores TERM": "trap '' TERM HUP; while :; do sleep 60; done",
    "a forked child holds stdout": "sleep 60 & wait",
    "a child in a session of its own": "setsid sleep 60 & sleep 60",
}


def measure(figures: Figures) -> None:
    """The real nvidia-smi where the distribution has it, else a program that prints its text."""
    with tempfile.TemporaryDirectory(prefix="gpuguard-bench-") as folder:
        box = simulated_host(Path(folder) / "host", _CARDS)
        kind = _install_nvidia_smi(box)
        box.configure()
        command = [sys.executable, "-m", "gpuguard", "--root", str(box.root), "--json", "verify"]
        runs = [run(command, env=program_environment()) for _ in range(_ROUNDS)]
        for done in runs:
            assert done.exit_status == 0, done.output
            assert json.loads(done.output)["p2p"]["sources"] == ["nvml", "nvidia-smi"]
        figures.add(
            f"verify, {_CARDS} cards: wall",
            [done.seconds for done in runs],
            "s",
            bound=0.5,
            method=f"whole process with a configuration: NVML by the real binding in a child, and "
            f"three calls of {kind}, both on the simulated libnvidia-ml",
        )
        figures.add(
            f"verify, {_CARDS} cards: peak memory",
            [done.peak_mib for done in runs],
            "MiB",
            method="VmHWM of the Python process without its children",
            worst=True,
        )
        _child(figures, box)
    _hung_tools(figures)


def _install_nvidia_smi(box: P2pBox) -> str:
    try:
        lab = realroot.Lab(realroot.cache_dir() / "apt")
        lab.update()
        (package,) = lab.download("nvidia-smi")
        unpacked = package.with_suffix("")
        subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
        (box.root / "usr/bin").mkdir()
        shutil.copy(next(unpacked.rglob("current/nvidia-smi")), box.root / "usr/bin/nvidia-smi")
    except (OSError, subprocess.CalledProcessError, StopIteration):
        box.smi()
        return "a stand-in for nvidia-smi"
    return f"the real nvidia-smi ({package.name.split('_')[1]})"


def _child(figures: Figures, box: P2pBox) -> None:
    library = {"LD_LIBRARY_PATH": str(box.root / LIBRARY_DIR)}
    # It ends within 0.1 s, too soon to be sampled: it prints its own peak afterwards.
    code = (
        "from gpuguard.probes.nvml_child import main; main(); "
        "print('', *(l for l in open('/proc/self/status') if l.startswith('VmHWM')))"
    )
    peaks = []
    for _ in range(3):
        done = run([sys.executable, "-P", "-c", code], env={**program_environment(), **library})
        assert done.exit_status == 0, done.output
        peaks.append(int(done.output.split()[-2]) / 1024)
    figures.add(
        "NVML child: peak memory", peaks, "MiB", bound=50, worst=True,
        method="VmHWM of the child at its end",
    )  # fmt: skip


def _hung_tools(figures: Figures) -> None:
    LocalHost().run("true", timeout=5, grace=0.15)  # sh is imported once
    for name, script in _HANGS.items():
        seconds = []
        for _ in range(5):
            began = time.monotonic()
            with suppress(CommandTimeoutError):
                LocalHost().run("sh", "-c", script, timeout=_DEADLINE, grace=0.15)
                raise AssertionError("it should have hung")
            seconds.append(time.monotonic() - began - _DEADLINE)
        figures.add(
            f"hung tool, {name}: beyond its deadline", seconds, "s", bound=0.2, worst=True,
            method=f"deadline {_DEADLINE:g} s; worst of 5",
        )  # fmt: skip
