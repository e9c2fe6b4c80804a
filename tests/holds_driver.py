"""Run under faultshim.so: change holds again and again, killed one operation later each time.

usage: python -m tests.holds_driver ROOT {hold|lift|unhold|again}
ROOT is a tree with packages, not changed yet; work is done on copies beside it. Prints one JSON
object: operations in all, and how each kill ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # noqa: F401 - imported once, not in each child that is killed
import sh  # noqa: F401

from gpuguard.host import LocalHost
from gpuguard.ledger import read_ledger
from gpuguard.probes.dpkg import read_packages
from gpuguard.verbs.holds import hold, hold_again, lift_for_window, unhold
from tests.commit_driver import in_child

_IN_MEMORY = Path("/dev/shm")  # dpkg syncs a lot; nothing of it is to survive


def prepare(root: Path, kind: str) -> None:
    """What was there before the change that is killed."""
    if kind != "hold":
        hold(LocalHost(root), None)
    if kind == "again":
        lift_for_window(LocalHost(root))


def change(root: Path, kind: str) -> object:
    """The change itself."""
    host = LocalHost(root)
    actions: dict[str, Callable[[], object]] = {
        "hold": lambda: hold(host, None),
        "lift": lambda: lift_for_window(host),
        "unhold": lambda: unhold(host),
        "again": lambda: hold_again(host, None),
    }
    return actions[kind]()


def state(root: Path) -> dict[str, Any]:
    """What dpkg and the ledger say, without times."""
    host = LocalHost(root)
    ledger = read_ledger(host)
    held = sorted(name for name, package in read_packages(host).items() if package.is_held)
    if ledger is None:
        return {"held": held, "active": False, "ours": [], "lifted": []}
    return {
        "held": held,
        "active": ledger.active,
        "ours": sorted(ledger.packages),
        "lifted": sorted(ledger.lifted),
    }


def main() -> None:
    before, kind = Path(sys.argv[1]), sys.argv[2]
    prepare(before, kind)
    tempfile.gettempdir()  # finds out by writing a file, once a process
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as work:
        result = kill_everywhere(before, kind, Path(work) / "now")
    sys.stdout.write(json.dumps(result) + "\n")


def kill_everywhere(before: Path, kind: str, now: Path) -> dict[str, Any]:
    """Do the change once in full, then kill it before each of its operations."""

    def fresh() -> Path:
        shutil.rmtree(now, ignore_errors=True)
        shutil.copytree(before, now, symlinks=True)
        return now

    fresh()
    status, operations = in_child(lambda: change(now, kind), 0)
    assert status == 0, status
    if kind == "lift":  # what a killed window ends in: all is held again
        hold_again(LocalHost(now), None)
    new, old = state(now), state(fresh())
    ends = {"old": 0, "new": 0}
    problems = []
    for kill_at in range(1, operations + 1):
        root = fresh()
        status, _ = in_child(lambda root=root: change(root, kind), kill_at)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            problems.append(f"{kill_at}: not killed but {status}")
        # the next automatic run may be killed as well
        in_child(lambda root=root: hold_again(LocalHost(root), None), kill_at % 13 + 1)
        hold_again(LocalHost(root), None)
        found = state(root)
        if found not in (old, new):
            problems.append(f"{kill_at}: {found}")
        else:
            ends["new" if found == new else "old"] += 1
    return {"operations": operations, "ends": ends, "problems": problems[:5]}


if __name__ == "__main__":
    main()
