"""Run all benchmarks, or those named.

`python -m benchmarks [status] [verify] [hook] [daemon] [rebuild] [--repeat N]`
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import daemon, hook, rebuild, status, verify
from benchmarks.figures import Figures

RESULTS = Path(__file__).parent / "results.md"
_ALL = ["status", "verify", "hook", "daemon", "rebuild"]


def main() -> None:
    """Measure, print, and write results.md (only when everything was measured)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("which", nargs="*", help=f"{', '.join(_ALL)}; default: all")
    parser.add_argument("--repeat", type=int, default=3, help="rounds of the rebuild comparison")
    chosen = parser.parse_args()
    which = chosen.which or _ALL
    figures = Figures()
    if "status" in which:
        status.measure(figures)
    if "verify" in which:
        verify.measure(figures)
    if "hook" in which:
        hook.measure(figures)
    if "daemon" in which:
        daemon.measure(figures)
    if "rebuild" in which:
        rebuild.measure(figures, rounds=chosen.repeat)
    text = _head() + figures.markdown()
    print(text)
    if set(which) == set(_ALL):
        RESULTS.write_text(text)
    sys.exit(0 if figures.all_reached else 1)


def _head() -> str:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        "# Benchmark results\n\n"
        "Written by `make bench`. The machines are noisy: compare ratios within one run, not\n"
        "seconds between runs. A figure that falls short says so.\n\n"
        f"- date: {datetime.now(UTC):%Y-%m-%d}\n"
        f"- machine: {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load average at the end {load}\n\n"
    )


if __name__ == "__main__":
    main()
