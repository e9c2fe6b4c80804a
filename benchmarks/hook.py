"""What apt waits for: the hook that apt calls after each run of dpkg."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import Figures
from tests.aptroot import PROGRAM, AptRoot, make_apt_root

_RUNS = 300
_PACKAGES = 4000
_KERNELS = 10
_BOUND_MS = 10.0


def measure(figures: Figures) -> None:
    """The line of apt's configuration, run as apt runs it, against ``sh -c true``."""
    with tempfile.TemporaryDirectory(prefix="gpuguard-bench-") as folder:
        apt = _make_root(Path(folder) / "root")
        line = _line(apt)
        for news in (False, True):
            _settle(apt, news=news)
            # with news each call asks anew, as if an automatic run had just been there
            prepare = f"rm -f {apt.path('var/lib/gpuguard/rebuild-wanted')}"
            empty, hook = _medians(apt, ["true", line], prepare)
            what = "news: it asks for a rebuild" if news else "nothing new"
            figures.add(
                f"apt hook, {what}: cost of a call",
                [hook - empty],
                "ms",
                bound=_BOUND_MS,
                method=f"median of {_RUNS} runs of `sh -c` with the line of 99gpuguard, as apt "
                f"does it, less that of `sh -c true` ({empty:.1f} ms), by hyperfine; a root with "
                f"{_PACKAGES} packages and {_KERNELS} kernels",
            )


def _make_root(root: Path) -> AptRoot:
    apt = make_apt_root(root)
    apt.program("exit 0")
    subprocess.run(
        [sys.executable, "-m", "gpuguard", "--root", root, "setup", "--program", f"/{PROGRAM}"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    (root / "etc/gpuguard").mkdir()
    (root / "etc/gpuguard/gpuguard.yaml").touch()
    for number in range(_PACKAGES):
        (root / f"usr/share/doc/package-{number}").mkdir(parents=True)
        (root / f"var/lib/dpkg/info/package-{number}.list").touch()
    for number in range(_KERNELS):
        (root / f"usr/lib/modules/6.1.0-{number}-amd64/updates/dkms").mkdir(parents=True)
        (root / f"usr/src/linux-headers-6.1.0-{number}-amd64").mkdir(parents=True)
    return apt


def _line(apt: AptRoot) -> str:
    text = apt.path("etc/apt/apt.conf.d/99gpuguard").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("DPkg::Post-Invoke")]
    return line.split('"')[1]


def _settle(apt: AptRoot, *, news: bool) -> None:
    file = apt.path("var/lib/gpuguard/last-run.json")
    file.touch()
    then = time.time() + (-3600 if news else 1)
    os.utime(file, (then, then))


def _medians(apt: AptRoot, lines: list[str], prepare: str) -> list[float]:
    """Milliseconds; each line is run by a shell in the root."""
    scripts = [apt.script(f"tmp/line-{number}", line) for number, line in enumerate(lines)]
    commands = [f"chroot {apt.root} sh /tmp/{script.name}" for script in scripts]
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        subprocess.run(
            ["hyperfine", "--shell=none", "--warmup=20", f"--runs={_RUNS}", "--style=none",
             f"--prepare={prepare}", f"--export-json={result.name}", *commands],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return [1000 * run["median"] for run in json.load(result)["results"]]
