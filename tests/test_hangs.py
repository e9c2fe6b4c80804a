"""Tools that hang: what they cost, what they leave behind; never a second one (CASES C49)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpuguard.errors import CommandNotFoundError, CommandTimeoutError
from gpuguard.host import LocalHost
from gpuguard.probes.guard import OutstandingError, guarded
from gpuguard.state import RUN_DIR
from tests.building import folder_for_others
from tests.p2pbox import P2pBox, gone, program_environment

DEADLINE = 0.6
#: "Its deadline plus 0.2 s, no more"; a busy machine gets twice as much to be scheduled at all.
SLACK = 0.2 if (os.getloadavg()[0] < (os.cpu_count() or 1)) else 0.4


def timed(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def shell(script: str, timeout: float = DEADLINE) -> CommandTimeoutError:
    """What comes of a script that hangs."""
    with pytest.raises(CommandTimeoutError) as caught:
        LocalHost().run("sh", "-c", script, timeout=timeout, grace=0.15, ok=None)
    return caught.value


def written_pids(folder: Path) -> list[int]:
    return [int(line) for file in folder.glob("pid*") for line in file.read_text().split()]


# --- one run --------------------------------------------------------------------------------


def test_a_run_that_ends() -> None:
    done = LocalHost().run("sh", "-c", "echo out; echo err >&2; exit 3",
                           timeout=5, grace=0.15, ok=None)  # fmt: skip
    assert (done.exit_status, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(CommandNotFoundError):
        LocalHost().run("no-such-program", timeout=5, grace=0.15)


HANGS = {
    "ignores TERM": "trap '' TERM HUP; echo $$ >>{0}/pid; while :; do sleep 60; done",
    "forks": "sleep 60 & echo $! $$ >>{0}/pid; wait",
    "forks into a session of its own": (
        "setsid sh -c 'trap \"\" HUP TERM; echo $$ >>{0}/pid1; sleep 60; sleep 60' & "
        "echo $$ >>{0}/pid2; wait"
    ),
    "forks twice": (
        "(setsid sh -c 'echo $$ >>{0}/pid1; exec sleep 60' &); echo $$ >>{0}/pid2; sleep 60"
    ),
    "stops itself": "echo $$ >>{0}/pid; kill -STOP $$",
    "closes its output": "exec >&- 2>&-; echo $$ >>{0}/pid; exec sleep 60",
}


@pytest.mark.parametrize("script", HANGS.values(), ids=HANGS)
def test_it_costs_its_deadline_and_leaves_nothing(tmp_path: Path, script: str) -> None:
    seconds = timed(lambda: shell(script.format(tmp_path)))
    assert DEADLINE <= seconds < DEADLINE + SLACK
    pids = written_pids(tmp_path)
    assert pids
    assert gone(pids)


@pytest.mark.parametrize(
    "script",
    ["sleep 60 & echo $! >{0}/pid", "setsid sh -c 'echo $$ >{0}/pid; exec sleep 60' & sleep 0.2"],
    ids=["same session", "own session"],
)
def test_a_child_that_holds_the_output_is_not_waited_for(tmp_path: Path, script: str) -> None:
    began = time.monotonic()
    done = LocalHost().run("sh", "-c", f"{script.format(tmp_path)}; echo answer",
                           timeout=5, grace=0.15)  # fmt: skip
    assert time.monotonic() - began < 1.5
    assert done.stdout == "answer\n"
    assert gone(written_pids(tmp_path))


def test_output_without_end() -> None:
    done = LocalHost().run("yes", timeout=20, grace=0.15, ok=None)
    assert done.exit_status != 0
    assert len(done.stdout) <= 16 << 20


def test_no_descriptor_is_left_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        shell("sleep 60", timeout=0.1)
        LocalHost().run("true", timeout=5, grace=0.15)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- the verb -------------------------------------------------------------------------------


@pytest.fixture
def box(tmp_path: Path) -> P2pBox:
    return P2pBox(tmp_path / "host").nvml().smi()


def test_a_hung_nvidia_smi_beside_an_nvml_that_answers(box: P2pBox) -> None:
    box.smi_script("trap '' TERM; sleep 60 & sleep 60")
    status, document = box.verify("--timeout", "1")
    (finding,) = document["findings"]
    assert (status, document["p2p"]["sources"]) == (0, ["nvml"])
    assert (finding["code"], finding["severity"]) == ("probe-timeout", "warning")


def test_a_hung_nvml_beside_an_nvidia_smi_that_answers(box: P2pBox) -> None:
    box.without_nvml("import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)")
    status, document = box.verify("--timeout", "1")
    assert (status, document["p2p"]["sources"]) == (0, ["nvidia-smi"])
    assert document["sources"][0]["reason"] == "timeout"


def test_all_calls_of_nvidia_smi_share_one_deadline(box: P2pBox) -> None:
    box.without_nvml().smi_script(f"sleep 0.7; cat {box.root}/smi-list.txt")
    began = time.monotonic()
    status, document = box.verify("--timeout", "1")
    assert time.monotonic() - began < 3
    assert (status, document["sources"][1]["reason"]) == (3, "timeout")


def test_both_hang(box: P2pBox) -> None:
    box.without_nvml("import time; time.sleep(60)").smi_script("sleep 60")
    status, document = box.verify("--timeout", "0.5")
    assert (status, document["findings"][0]["evidence"]["reason"]) == (3, "timeout")


def test_no_interpreter_start_is_paid_for_a_second_deadline(box: P2pBox) -> None:
    healthy = min(timed(box.verify) for _ in range(3))
    box.smi_script("trap '' TERM; sleep 60")
    hung = min(timed(lambda: box.verify("--timeout", "1")) for _ in range(3))
    assert hung - healthy < 1 + SLACK


# --- at most one ----------------------------------------------------------------------------


def test_a_second_gpuguard_waits_for_the_first(tmp_path: Path) -> None:
    host = LocalHost(tmp_path)
    with guarded(host, wait=1):
        began = time.monotonic()
        with pytest.raises(OutstandingError, match="another gpuguard"), guarded(host, wait=0.3):
            pytest.fail("it must not come in")
        assert 0.3 <= time.monotonic() - began < 1
    with guarded(host, wait=0):
        pass


def test_the_lock_is_kept_by_the_program_itself(tmp_path: Path) -> None:
    """Also when the gpuguard that started it was killed."""
    host = LocalHost(tmp_path)
    code = (
        "from gpuguard.host import LocalHost; from gpuguard.probes.guard import guarded\n"
        f"with guarded(LocalHost({str(tmp_path)!r}), wait=1) as guard:\n"
        f"    guard.run('sh', '-c', 'echo $$ >{tmp_path}/pid; exec sleep 60', timeout=60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], env=program_environment())
    deadline = time.monotonic() + 20
    while not written_pids(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    starter.kill()
    starter.wait()
    with pytest.raises(OutstandingError), guarded(host, wait=0.1):
        pytest.fail("the program still runs")
    os.kill(written_pids(tmp_path)[0], signal.SIGKILL)
    with guarded(host, wait=2):
        pass


def test_a_record_of_a_process_that_is_gone_means_nothing(tmp_path: Path) -> None:
    folder = tmp_path / RUN_DIR.lstrip("/")
    folder.mkdir(parents=True)
    record = folder / "probe-outstanding.json"
    contents: tuple[object, ...] = (
        {
            "pid": os.getpid(),
            "started": 1,
            "command": "nvidia-smi",
            "since": "2026-01-01T00:00:00Z",
        },
        {"pid": 2**22 + 1, "started": 1, "command": "x", "since": "x"},
        {"pid": "x"},
        [],
    )
    for content in contents:
        record.write_text(json.dumps(content))
        with guarded(LocalHost(tmp_path), wait=0):
            assert not record.exists()


def test_where_nothing_can_be_written_the_driver_is_asked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").write_text("no folder")
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "run"))
    with guarded(LocalHost(tmp_path), wait=0) as guard:
        assert guard.run("echo", "answer", timeout=5).stdout == "answer\n"


def test_a_user_has_a_lock_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").write_text("no folder")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    with guarded(LocalHost(tmp_path), wait=0):
        assert (tmp_path / "user/gpuguard/probe.lock").stat().st_mode & 0o777 == 0o600
        with pytest.raises(OutstandingError), guarded(LocalHost(tmp_path), wait=0):
            pytest.fail("it must not come in")


UNKILLABLE = r"""
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
int main(void)
{
    FILE *log = fopen(LOG, "a");
    if (setuid(0) || !log)
        return 1;
    fprintf(log, "%d\n", getpid());
    fclose(log);
    for (int s = 1; s < 32; s++)
        signal(s, SIG_IGN);
    for (;;)
        pause();
}
"""


@pytest.fixture
def unkillable() -> Iterator[tuple[P2pBox, Path]]:
    """A box of nobody's with an nvidia-smi that nobody cannot kill: it has become root.

    For its parent that is what a process in uninterruptible sleep is: KILL does nothing.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root to make a program that its user cannot kill: sudo make test")
    with folder_for_others() as folder:
        box = P2pBox(folder / "host")
        log = folder / "started"
        log.touch(mode=0o666)
        log.chmod(0o666)
        (folder / "smi.c").write_text(UNKILLABLE)
        program = box.root / "usr/bin/nvidia-smi"
        program.parent.mkdir(parents=True)
        subprocess.run(
            ["gcc", f'-DLOG="{log}"', "-o", program, folder / "smi.c"], check=True, cwd=folder
        )
        program.chmod(0o4755)
        run = box.root / RUN_DIR.lstrip("/")
        run.mkdir(parents=True)
        run.chmod(0o777)
        yield box, log
        for pid in {int(line) for line in log.read_text().split()}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


_TICK = """
import json, os, sys, time
from gpuguard.host import LocalHost
from gpuguard.probes import p2p
host = LocalHost(sys.argv[1])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for _ in range(int(sys.argv[2])):
    began = time.monotonic()
    answers = p2p.probe_answers(host, 0.6)
    smi = answers["nvidia-smi"]
    print(json.dumps([time.monotonic() - began, smi.reason, smi.problem, answers["nvml"].reason]))
"""


def test_twenty_ticks_leave_at_most_one(unkillable: tuple[P2pBox, Path]) -> None:
    box, log = unkillable
    done = subprocess.run(
        [sys.executable, "-c", "import sh\n" + _TICK, box.root, "20"],
        env=program_environment(), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    (seconds, reason, problem, _), *later = map(json.loads, done.stdout.splitlines())
    assert reason == "outstanding"
    assert "cannot be killed" in problem
    assert seconds < 0.6 + 0.6 + 2 * SLACK  # NVML's child is a whole interpreter
    assert len(later) == 19
    for tick_seconds, tick_reason, tick_problem, nvml in later:
        assert tick_seconds < 0.2
        assert (tick_reason, nvml) == ("outstanding", "outstanding")
        assert tick_problem.startswith("probe outstanding since 20")
    assert len(log.read_text().split()) == 1
    # root, too, sees it and starts nothing
    status, document = box.verify()
    assert (status, document["findings"][0]["evidence"]["reason"]) == (3, "outstanding")
    assert "probe outstanding since" in document["findings"][0]["message"]
    # and once it is gone everything is as before
    pid = int(log.read_text())
    os.kill(pid, signal.SIGKILL)
    assert gone([pid])
    box.nvml().smi()
    assert box.verify()[0] == 0
