"""Run under faultshim.so: set up, update or remove again and again, killed one operation later.

usage: python -m tests.setup_driver WORKDIR {setup|update|remove}
Prints one JSON object: operations in all, and how each kill ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from gpuguard.apply.recovery import recover
from gpuguard.host import LocalHost
from gpuguard.state import SETUP_FILE
from gpuguard.verbs import setup, setup_remove
from tests import toys
from tests.commit_driver import in_child

PROGRAM = "/opt/gpuguard/bin/gpuguard"
COMPLETIONS = {"bash": "complete\n"}
OTHER = "/opt/other/bin/gpuguard"


def make_root(root: Path) -> None:
    for program in (PROGRAM, OTHER):
        file = root / program.lstrip("/")
        file.parent.mkdir(parents=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    (root / "var/lib").mkdir(parents=True)


def change(root: Path, kind: str) -> None:
    host = LocalHost(root)
    if kind == "remove":
        setup_remove.remove(host, setup_remove.prepare_removal(host))
        return
    program = OTHER if kind == "update" else PROGRAM
    setup.install(host, setup.prepare(host, None, COMPLETIONS, program=program))


def snapshot(root: Path) -> dict[str, str]:
    """All but our own state; of that only which files are known to be ours.

    An empty folder of our name is what a kill right after the last file may leave: that is all.
    """
    files = {
        path: what
        for path, what in toys.snapshot(root, without=("var/lib/gpuguard",)).items()
        if "gpuguard" not in Path(path).parts or not _is_empty_folder(root / path.lstrip("/"))
    }
    record = root / SETUP_FILE.lstrip("/")
    if record.exists():
        document = json.loads(record.read_text())
        files["record"] = json.dumps([document["program"], document["files"]])
    return files


def _is_empty_folder(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir():
        return False
    return not any(entry.is_symlink() or entry.is_file() for entry in path.rglob("*"))


def main() -> None:
    work, kind = Path(sys.argv[1]), sys.argv[2]
    before, after, now = work / "before", work / "after", work / "now"
    make_root(before)
    # all resources are read here, once: somebody may be editing them
    setup.prepare(LocalHost(before), None, COMPLETIONS, program=PROGRAM)
    if kind != "setup":
        change(before, "setup")
    shutil.copytree(before, after, symlinks=True)
    status, operations = in_child(lambda: change(after, kind), 0)
    assert status == 0, status
    old, new = snapshot(before), snapshot(after)
    assert old != new
    ends, problems = {"old": 0, "new": 0}, []
    for kill_at in range(1, operations + 1):
        shutil.rmtree(now, ignore_errors=True)
        shutil.copytree(before, now, symlinks=True)
        status, _ = in_child(lambda: change(now, kind), kill_at)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            problems.append(f"{kill_at}: not killed but {status}")
        in_child(lambda: recover(LocalHost(now)), kill_at % 13 + 1)
        recover(LocalHost(now))
        state = snapshot(now)
        if state not in (old, new):
            differs = sorted(p for p in {*state, *old} if state.get(p) != old.get(p))
            problems.append(f"{kill_at}: in between: {differs[:6]}")
            continue
        ends["old" if state == old else "new"] += 1
        # and doing it again completes it, whatever the end was
        if kind != "remove" or state == old:
            change(now, kind)
        if snapshot(now) != new:
            problems.append(f"{kill_at}: a second try does not complete it")
    print(json.dumps({"operations": operations, "ends": ends, "problems": problems[:10]}))


if __name__ == "__main__":
    main()
