"""Other people's processes neither hold our lock nor pass for dkms."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuguard.apply.lock import dkms_runs, exclusive, is_held
from gpuguard.host import LocalHost
from tests.box import K1, REPOSITORY, Box
from tests.building import needs_root

pytestmark = needs_root


@contextmanager
def called_dkms(*words: str, user: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    line = f"exec -a dkms sh -c 'sleep 60; :' {' '.join(words)}"
    group = None if user is None else "nogroup"
    process = subprocess.Popen(["bash", "-c", line], user=user, group=group, start_new_session=True)
    time.sleep(0.3)
    try:
        yield process
    finally:
        subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=True)
        process.wait()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_users_process_is_no_dkms() -> None:
    with called_dkms(user="nobody"):
        assert not dkms_runs(LocalHost("/"))


def test_a_dkms_is_seen_beside_others() -> None:
    with called_dkms("--a-tree"), called_dkms("install") as process:
        assert f"process {process.pid}" in dkms_runs(LocalHost("/"))


def test_who_only_looks_at_dkms_is_no_dkms(tmp_path: Path) -> None:
    hook = tmp_path / "dkms"
    hook.write_text("#!/bin/sh\nsleep 60\n")
    hook.chmod(0o755)
    with called_dkms("status"):
        wait_until(lambda: not dkms_runs(LocalHost("/")))  # a real one of another test ends
    for words in (["tail", "-f", str(hook)], ["watch", "dkms", "install"]):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: not dkms_runs(LocalHost("/")))
        finally:
            process.kill()
            process.wait()
    process = subprocess.Popen([hook, "6.1.0-50-amd64"], start_new_session=True)
    try:
        wait_until(lambda: dkms_runs(LocalHost("/")))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_nobody_else_can_lock(box: Box) -> None:
    lock = box.root / "var/lib/gpuguard/lock"
    lock.parent.mkdir()
    lock.touch(mode=0o644)  # as an earlier version made it
    box.rebuilt("--kernel", K1)
    assert lock.stat().st_mode & 0o777 == 0o600
    done = subprocess.run(
        ["flock", "-n", lock, "true"],
        user="nobody",
        group="nogroup",
        capture_output=True,
        check=False,
    )
    assert done.returncode == 66  # cannot open it


def test_an_ordinary_user_sees_that_it_is_held(box: Box) -> None:
    host = LocalHost(box.root)
    code = (
        "import os; from pathlib import Path; import sys; from gpuguard.host import flock;"
        "os.setgid(65534); os.setuid(65534); print(flock._is_listed(Path(sys.argv[1])))"
    )
    path = host.path("/var/lib/gpuguard/lock")

    def seen() -> str:
        command = [sys.executable, "-c", code, str(path)]
        return subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip()

    with exclusive(host, 1):
        assert is_held(host)
        assert seen() == "True"
    assert not is_held(host)
    assert seen() == "False"
