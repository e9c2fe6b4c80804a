"""Nothing of a build outlives it, and nothing of the same account gets into it."""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuguard.build import cell
from gpuguard.build.log import BuildLog
from gpuguard.build.make import Make
from gpuguard.build.progress import Silent
from gpuguard.build.staging import staging
from gpuguard.errors import BuildError
from gpuguard.host import BuildUser, LocalHost
from tests.building import USER, Workplace, needs_root

_PR_SET_DUMPABLE = 4
#: Away from make's session and output, so that neither its end nor a kill of its group ends it.
LEAVES_A_PROCESS = "all:\n\t@setsid sleep 300 >/dev/null 2>&1 </dev/null &\n\t@echo made\n"


def account() -> BuildUser:
    entry = pwd.getpwnam(USER)
    return BuildUser(entry.pw_name, entry.pw_uid, entry.pw_gid)


@pytest.fixture
def make(workplace: Workplace) -> Iterator[Make]:
    """make in a staging folder, as root for another account or as whoever runs the tests."""
    user = account() if os.geteuid() == 0 else None
    with (
        staging(workplace.host, "6.1.0-50-amd64", user) as here,
        BuildLog(workplace.root / "build.log", here.tree) as log,
    ):
        yield Make(
            host=workplace.host, staging=here, jobs=1, timeout_seconds=60, log=log,
            log_name="build.log", progress=Silent(),
        )  # fmt: skip


def sleepers(make: Make) -> list[int]:
    """Living processes that work in the staging tree."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "cwd").readlink() == make.staging.tree:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("namespace", [True, False])
@pytest.mark.parametrize("end", ["", "\t@exit 1\n", "\t@sleep 300\n"])
def test_nothing_is_left_behind(
    make: Make, namespace: bool, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not namespace:
        monkeypatch.setattr(cell, "words_before", lambda *_: ())
    object.__setattr__(make, "timeout_seconds", 2 if "sleep" in end else 60)
    (make.staging.tree / "Makefile").write_text(LEAVES_A_PROCESS + end)
    if end:
        with pytest.raises(BuildError) as caught:
            make.run("modules", "compiling", ())
        assert caught.value.code == ("build-timeout" if "sleep" in end else "build-failed")
    else:
        make.run("modules", "compiling", ())
    assert sleepers(make) == []


@needs_root
def test_a_process_that_hides_from_its_account_is_found(make: Make) -> None:
    user = make.staging.user
    assert user is not None
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        os.write(writer, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    try:
        cell.clear(user)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@needs_root
def test_a_stranger_of_the_same_account_cannot_enter(make: Make, workplace: Workplace) -> None:
    """What F2 of the review was: the build user's own process, left from another build."""
    (make.staging.tree / "Makefile").write_text("all:\n\t@id -u; touch made\n")
    make.run("modules", "compiling", ())
    assert (make.staging.tree / "made").exists()
    user = account()
    other = make.staging.root.with_name("other")
    other.mkdir()
    another_build = cell.enclose(other, user)
    assert another_build is not None
    for stranger in (user, another_build):
        for words in (("cat", "Makefile"), ("rm", "made"), ("touch", "new")):
            path = str(make.staging.tree / words[1])
            answer = workplace.host.run(words[0], path, timeout=10, user=stranger, ok=None)
            assert answer.exit_status == 1
            assert "Permission denied" in answer.stderr
    other.rmdir()


@needs_root
def test_where_there_is_no_such_group_the_account_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "chown", refuse)
    assert cell.enclose(tmp_path, account()) == account()
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    cell.clear(account())  # must not kill what is not the build's


@needs_root
def test_the_compiler_sees_no_process_but_its_own(make: Make) -> None:
    if not cell.words_before(make.host, make.staging.user):
        pytest.skip("no PID namespace here")
    (make.staging.tree / "Makefile").write_text(
        "all:\n\t@echo pid=$$(ls -d /proc/[0-9]* | wc -l)\n"
    )
    make.run("modules", "compiling", ())
    (line,) = [line for line in make.log.tail.splitlines() if line.startswith("pid=")]
    assert int(line.removeprefix("pid=")) < 10


@needs_root
def test_kill_9_of_gpuguard_ends_the_compiler(make: Make) -> None:
    if not cell.words_before(make.host, make.staging.user):
        pytest.skip("no PID namespace here")
    (make.staging.tree / "Makefile").write_text("all:\n\t@touch begun; sleep 300\n")
    child = os.fork()
    if child == 0:
        try:
            make.run("modules", "compiling", ())
        finally:
            os._exit(1)
    begun = make.staging.tree / "begun"
    wait_until(begun.exists)
    assert sleepers(make) != []
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: sleepers(make) == [])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_machine_without_unshare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cell, "_NAMESPACE", (str(tmp_path / "no-such-program"), "--pid"))
    assert cell.words_before(LocalHost(), account()) == ()
    assert cell.words_before(LocalHost(), None) == ()
