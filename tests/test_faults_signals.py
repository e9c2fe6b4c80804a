"""SIGTERM, SIGINT and kill -9 of the whole program, while it builds and while it commits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.box import K1, K2, PATCH, SOURCE, Box, initramfs
from tests.building import needs_root

_SECONDS = 60.0
_STOPS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running(*words: str) -> list[psutil.Process]:
    """Processes that have these words on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if all(word in line for word in words):
            found.append(process)
    return found


@contextmanager
def endless_build(box: Box) -> Iterator[str]:
    """A compiler that never ends; the word by which it is known."""
    number = f"9{os.getpid()}.25"
    makefile = box.root / SOURCE / "kernel-open/Makefile"
    good = makefile.read_text()
    makefile.write_text(f"modules:\n\t@echo begin; touch nvidia.ko; sleep {number}; sleep 1\n")
    try:
        yield number
    finally:
        makefile.write_text(good)
        for process in running("sleep", number):
            process.kill()


def stopped(process: subprocess.Popen[str], signum: signal.Signals) -> tuple[int, str]:
    """Send a signal to the program alone; exit status and what it said."""
    process.send_signal(signum)
    _, err = process.communicate(timeout=_SECONDS)
    return process.returncode, err


@pytest.mark.parametrize("signum", _STOPS)
def test_a_build_that_is_stopped_leaves_nothing(box: Box, signum: signal.Signals) -> None:
    with endless_build(box) as number:
        before = box.snapshot()
        process = box.start("rebuild", "--kernel", K2)
        wait_for(lambda: running("sleep", number))

        status, err = stopped(process, signum)

        assert status == _STOPS[signum], err
        assert "Traceback" not in err
        wait_for(lambda: not running("sleep", number))
        assert box.snapshot() == before
        assert box.leftovers() == []
    box.rebuilt("--kernel", K2)  # a stopped build is no failed one


def test_a_killed_build_is_cleaned_up_by_the_next(box: Box) -> None:
    with endless_build(box) as number:
        before = box.snapshot()
        process = box.start("rebuild", "--kernel", K2)
        wait_for(lambda: running("sleep", number))
        status, _ = stopped(process, signal.SIGKILL)
        assert status == -signal.SIGKILL
        assert box.snapshot() == before
        (staging,) = (box.root / "var/cache/gpuguard/staging").iterdir()
    box.rebuilt("--kernel", K2)
    assert not staging.exists()
    assert box.leftovers() == []
    assert box.kernel(K2)["ready"] is True


def committing(box: Box, install_tool: Callable[..., None], *words: str) -> subprocess.Popen[str]:
    """The program in the middle of its commit: modules are in place, the initramfs half-way."""
    made = initramfs(box.root, K2, box.path(f"srv/built/{K2}/nvidia.ko"))
    install_tool(makes=made)
    initramfs(box.root, K2, box.dkms_copy(K2))
    (box.root / "srv/tool-waits").touch()
    return box.start(*(words or ("rebuild", "--kernel", K2)))


def tool_runs(box: Box) -> bool:
    half = box.root / f"boot/initrd.img-{K2}.new"
    return half.exists() and bool(running("/usr/sbin/update-initramfs", K2))


@needs_root
@pytest.mark.parametrize("signum", _STOPS)
def test_a_commit_that_is_stopped_is_undone_at_once(
    box: Box, install_tool: Callable[..., None], signum: signal.Signals
) -> None:
    process = committing(box, install_tool)
    before = box.snapshot()
    wait_for(lambda: tool_runs(box))
    assert (box.tree(K2) / "updates/gpuguard/nvidia.ko").exists()
    assert "change-interrupted" not in box.findings()  # it is under way

    status, err = stopped(process, signum)

    assert status == _STOPS[signum], err
    assert not running("/usr/sbin/update-initramfs", K2)
    (box.root / "srv/tool.log").unlink()
    assert box.snapshot() == before
    assert box.leftovers() == []
    assert box.backups() == []


@needs_root
def test_a_killed_commit_is_undone_by_the_next_start(
    box: Box, install_tool: Callable[..., None]
) -> None:
    process = committing(box, install_tool)
    before = box.snapshot()
    wait_for(lambda: tool_runs(box))
    stopped(process, signal.SIGKILL)
    wait_for(lambda: not running("/usr/sbin/update-initramfs", K2))  # died with it
    (box.root / "srv/tool.log").unlink()
    assert box.snapshot() != before
    found = box.findings()["change-interrupted"]
    assert found["severity"] == "critical"
    assert "rebuild" in found["message"]
    assert "interrupted rebuild" in box.run("plan").out

    answer = box.run("rollback", "--kernel", K1)  # has nothing to do, but starts

    assert f"the rebuild of {K2} started" in answer.err
    assert "was interrupted; everything is as it was before it" in answer.err
    assert box.snapshot() == before
    assert not (box.root / "var/lib/gpuguard/journal.jsonl").exists()
    assert box.backups() == []
    (box.root / "srv/tool-waits").unlink()
    box.rebuilt("--kernel", K2)
    assert box.leftovers() == []
    assert box.kernel(K2)["ready"] is True


@needs_root
def test_a_killed_rollback_ends_with_the_patched_modules(
    box: Box, install_tool: Callable[..., None]
) -> None:
    box.rebuilt("--kernel", K2)
    process = committing(box, install_tool, "rollback", "--kernel", K2)
    before = box.snapshot()
    wait_for(lambda: tool_runs(box))
    stopped(process, signal.SIGKILL)
    wait_for(lambda: not running("/usr/sbin/update-initramfs", K2))
    answer = box.run("rebuild", "--kernel", K1)
    assert f"the rollback of {K2}" in answer.err
    (box.root / "srv/tool.log").unlink()
    assert {k: v for k, v in box.snapshot().items() if K2 in k} == {
        k: v for k, v in before.items() if K2 in k
    }


def test_a_record_of_a_completed_change_is_cleaned_up(box: Box) -> None:
    box.rebuilt("--kernel", K2)
    after = box.snapshot()
    journal = box.root / "var/lib/gpuguard/journal.jsonl"
    header = {"schema": 1, "verb": "rebuild", "release": K2, "started": "t", "backup": None}
    undo = {"op": "nothing", "path": f"/{PATCH}"}
    lines = (header, undo, {"op": "commit"})
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    answer = box.run("rebuild", "--kernel", K2)
    assert "had been completed before it was killed" in answer.err
    assert box.snapshot() == after
    assert not journal.exists()


def test_two_at_once_take_turns(box: Box) -> None:
    box.configure(lock_timeout_seconds=120)
    both = [box.start("rebuild", "--kernel", release) for release in (K1, K2)]
    said = [process.communicate(timeout=_SECONDS * 2) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert box.status()["verdict"] == "ok"


def test_a_reader_that_goes_away_is_no_error(box: Box, tmp_path: Path) -> None:
    process = box.start("status", "--verbose")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(timeout=_SECONDS) in (1, 128 + signal.SIGPIPE)
    assert "Traceback" not in err
