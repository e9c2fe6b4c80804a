"""``rebuild --automatic``: what the units and the hooks run."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from typing import Any

import pytest

from tests.box import K1, K2, SOURCE, Box

QUEUE = "/var/lib/gpuguard/rebuild-wanted"
LAST_RUN = "/var/lib/gpuguard/last-run.json"
DPKG_LOCK = "/var/lib/dpkg/lock-frontend"


def queue(box: Box) -> None:
    box.path(QUEUE).parent.mkdir(parents=True, exist_ok=True)
    box.path(QUEUE).touch()


def last_run(box: Box) -> dict[str, Any]:
    return dict(json.loads(box.path(LAST_RUN).read_text()))


def test_it_rebuilds_what_is_not_ready_and_remembers_it(box: Box) -> None:
    queue(box)
    answer = box.json("rebuild", "--automatic")
    assert answer.status == 0
    assert {s["release"]: s["action"] for s in answer.document["steps"]} == dict.fromkeys(
        (K1, K2), "rebuild"
    )
    assert answer.document["reboot"]["safe"] is True
    assert not box.path(QUEUE).exists()
    found = last_run(box)
    assert (found["exit_status"], found["reboot_safe"], found["next_release"]) == (0, True, K2)
    assert [(k["release"], k["ok"]) for k in found["kernels"]] == [(K2, True), (K1, True)]


def test_the_second_run_finds_nothing_to_do(box: Box) -> None:
    box.rebuilt()
    queue(box)
    before = box.snapshot()
    answer = box.run("rebuild", "--automatic")
    assert answer.status == 0
    assert {k["action"] for k in last_run(box)["kernels"]} == {"leave"}
    after = box.snapshot()
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    assert {path for path in changed if "/modules.json" not in path} <= {
        QUEUE.lstrip("/"), LAST_RUN.lstrip("/"), QUEUE, LAST_RUN
    }  # fmt: skip


def test_a_failed_build_is_remembered_with_its_code(box: Box) -> None:
    box.path(f"/{SOURCE}/kernel-open/Makefile").write_text("modules:\n\t@exit 1\n")
    queue(box)
    answer = box.run("rebuild", "--automatic")
    assert answer.status == 70
    found = last_run(box)
    assert found["exit_status"] == 70
    assert found["reboot_safe"] is False
    assert {k["code"] for k in found["kernels"]} == {"build-failed"}
    assert not box.path(QUEUE).exists()


def test_with_dpkg_at_work_it_gives_up_in_time_and_stays_queued(box: Box) -> None:
    box.configure(automatic={"lock_timeout_seconds": 5})
    queue(box)
    lock = box.path(DPKG_LOCK)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        child = os.fork()
        if child == 0:  # POSIX locks are a process's own
            fcntl.lockf(file, fcntl.LOCK_EX)
            os.write(file.fileno(), b"held")
            signal.pause()
        while not lock.stat().st_size:
            os.sched_yield()
        try:
            answer = box.run("rebuild", "--automatic")
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert answer.status == 75
    assert "apt or dpkg is at work" in answer.err
    assert box.path(QUEUE).exists()
    assert lock.exists()


@pytest.mark.parametrize("damage", ["gone", "wrong"])
def test_without_a_usable_configuration_it_is_not_started_again_and_again(
    box: Box, damage: str
) -> None:
    config = box.path("/etc/gpuguard/gpuguard.yaml")
    if damage == "gone":
        config.unlink()
    else:
        config.write_text("sorce: {}\n")
    queue(box)
    answer = box.run("rebuild", "--automatic")
    assert answer.status == 78
    assert not box.path(QUEUE).exists()
    found = last_run(box)
    assert found["exit_status"] == 78
    assert found["problems"]


def test_where_nothing_is_to_be_built_by_itself_it_only_looks(box: Box) -> None:
    box.configure(automatic={"rebuild": False})
    queue(box)
    assert box.run("rebuild", "--automatic").status == 0
    found = last_run(box)
    assert (found["kernels"], found["reboot_safe"]) == ([], False)
    assert box.kernel(K2)["ready"] is False


def test_what_it_has_itself_changed_is_no_news_to_the_hooks(box: Box) -> None:
    """They compare with the file's time of change."""
    box.rebuilt()
    assert box.run("rebuild", "--automatic").status == 0
    assert box.path("/boot").stat().st_mtime <= box.path(LAST_RUN).stat().st_mtime


def test_what_dpkg_did_meanwhile_is_news_to_the_hooks(box: Box) -> None:
    status = box.path("/var/lib/dpkg/status")
    status.parent.mkdir(parents=True, exist_ok=True)
    status.touch()
    status.chmod(0o666)
    os.utime(status, (1, 1))
    makefile = box.path(f"/{SOURCE}/kernel-open/Makefile")
    makefile.write_text(makefile.read_text() + f"\t@touch {status}\n")
    assert box.json("rebuild", "--automatic").status == 0
    assert box.path(LAST_RUN).stat().st_mtime < status.stat().st_mtime


def test_a_kernel_and_force_are_not_for_it(box: Box) -> None:
    assert box.run("rebuild", "--automatic", "--force").status == 2
    assert box.run("rebuild", "--automatic", "--kernel", K1).status == 2


def test_a_full_disk_is_an_error_with_its_name(box: Box) -> None:
    """``last-run.json`` cannot be written: not a traceback, and not exit status 1."""
    box.rebuilt()
    box.path(LAST_RUN).mkdir()
    answer = box.run("rebuild", "--automatic")
    assert answer.status == 74
    assert "write-failed" in answer.err


def test_what_dpkg_does_during_a_run_is_looked_at_again(box: Box) -> None:
    """systemd drops what a path unit would have seen while the unit that it starts is at work."""
    status = box.path("/var/lib/dpkg/status")
    status.parent.mkdir(parents=True, exist_ok=True)
    status.touch()
    status.chmod(0o666)
    os.utime(status, (1, 1))
    makefile = box.path(f"/{SOURCE}/kernel-open/Makefile")
    makefile.write_text(makefile.read_text() + f"\t@touch {status}\n")
    assert box.json("rebuild", "--automatic").status == 0
    assert box.path(QUEUE).exists()
    assert box.json("rebuild", "--automatic").status == 0
    assert not box.path(QUEUE).exists()
