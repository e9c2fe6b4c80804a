"""How long the steps of earlier builds took: an estimate for people, nothing else."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from gpuguard.host import Host
from gpuguard.state import CACHE_DIR

_FILE = f"{CACHE_DIR}/durations.json"


@dataclass(frozen=True, slots=True)
class Earlier:
    """One step's last run: seconds, and lines of output to measure progress by."""

    seconds: float
    lines: int


def earlier(host: Host, step: str) -> Earlier | None:
    """The last run of a step on this host; a damaged file is as good as none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(host.path(_FILE).read_text("utf-8"))[step]
        return Earlier(float(entry["seconds"]), int(entry["lines"]))
    return None


def remember(host: Host, step: str, seconds: float, lines: int) -> None:
    """Keep a step's run for the next estimate."""
    known: dict[str, object] = {}
    with suppress(OSError, ValueError):
        content = json.loads(host.path(_FILE).read_text("utf-8"))
        known = content if isinstance(content, dict) else {}
    known[step] = asdict(Earlier(round(seconds, 1), lines))
    host.replace_file(_FILE, json.dumps(known, indent=1, sort_keys=True).encode() + b"\n")
