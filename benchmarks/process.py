"""Run a program, measure its wall time and the peak memory of that process alone."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, MiB (VmHWM of the process, without its children), status, output."""

    seconds: float
    peak_mib: float
    exit_status: int
    output: str


def run(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Measured:
    """Run it; the peak is sampled from /proc, since rusage would count the compilers too."""
    started = time.monotonic()
    child = subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    peak = 0.0
    output: list[str] = []
    import threading

    assert child.stdout is not None
    reader = threading.Thread(target=lambda: output.append(child.stdout.read()))  # type: ignore[union-attr]
    reader.start()
    while child.poll() is None:
        peak = max(peak, _high_water_mib(child.pid))
        time.sleep(_POLL_SECONDS)
    seconds = time.monotonic() - started
    reader.join()
    return Measured(seconds, peak, child.returncode, "".join(output))


def _high_water_mib(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except (OSError, ValueError):
        pass
    return 0.0
