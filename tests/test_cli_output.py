"""Where nothing can be printed: a closed or full standard output, a reader that went away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.box import K1, REPOSITORY, Box

NO_SPACE = "standard output could not be written: No space left on device"


def through_shell(box: Box, verb: str, where: str) -> subprocess.CompletedProcess[str]:
    """The program as a shell starts it, its standard output as ``where`` says."""
    line = f'"$0" -m gpuguard --root "$1" {verb} {where}'
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line, sys.executable, str(box.root)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["status", "config show", "--json config show"])
@pytest.mark.parametrize(
    ("where", "status", "said"),
    [
        (">/dev/full", 74, f"gpuguard: {NO_SPACE} [output-failed]\n"),
        (
            ">&-", 74,
            "gpuguard: standard output could not be written: Bad file descriptor [output-failed]\n",
        ),
        ("| true", 128 + signal.SIGPIPE, ""),
        (">&- 2>&- <&-", 74, ""),
    ],
)  # fmt: skip
def test_verbs_that_look(box: Box, verb: str, where: str, status: int, said: str) -> None:
    done = through_shell(box, verb, where)
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.parametrize("words", ["rebuild", "--json rebuild"])
def test_a_change_is_no_failure_because_nobody_hears_of_it(box: Box, words: str) -> None:
    done = through_shell(box, words, ">/dev/full")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"gpuguard: the change was made, as asked; {NO_SPACE}"
    assert [k["ready"] for k in box.status()["kernels"]] == [True, True]  # not the first one only


def test_a_rebuild_that_can_say_nothing_at_all(box: Box) -> None:
    assert through_shell(box, f"rebuild --kernel {K1}", ">&- 2>/dev/full <&-").returncode == 0
    assert box.kernel(K1)["ready"] is True


def test_a_failure_keeps_its_exit_status(box: Box) -> None:
    box.path("srv/nvidia/p2p.patch").write_text("")
    done = through_shell(box, "--json rebuild", ">/dev/full")
    assert done.returncode == 65
    assert done.stderr.splitlines()[-1] == f"gpuguard: see gpuguard status; {NO_SPACE}"


def test_an_empty_root_is_not_the_current_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuguard", "--root", "", "status"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpuguard: --root: give a directory, not an empty name [usage]\n"
