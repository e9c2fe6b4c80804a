"""The live line stays one line, on every terminal; and Ctrl-C leaves none behind."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from gpuguard.cli.progress import Bar, Lines, clipped, progress_for_terminal
from tests.box import REPOSITORY, SOURCE, Box

LONG = "  LD [M]  /var/cache/gpuguard/staging/6.8.0-100-generic/kernel-open/nvidia-modeset.ko"


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int, term: str = "xterm") -> int:
    """Stderr is a terminal of that width; the end at which one sees what it shows."""
    shows, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.setattr(sys, "stderr", os.fdopen(stderr, "w"))
    monkeypatch.setenv("TERM", term)
    return shows


@pytest.mark.parametrize(("columns", "fits"), [(80, 77), (60, 57), (20, 17), (0, 77)])
def test_a_redraw_never_wraps_nor_does_the_echo_of_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, columns: int, fits: int
) -> None:
    shows = terminal(monkeypatch, columns)
    bar = progress_for_terminal()
    assert isinstance(bar, Bar)
    bar.tick(0.5, LONG)
    line = os.read(shows, 4096).decode().removeprefix("\r\x1b[2K")
    assert len(line) == fits
    assert line.endswith("…")


def test_what_fits_is_not_cut() -> None:
    assert clipped("12345", 5) == "12345"
    assert clipped("123456", 5) == "1234…"
    assert clipped("a\tb\x1b[2K", 80) == "a b [2K"


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_wipe_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    terminal(monkeypatch, 80, term or "dumb")
    if not term:
        monkeypatch.delenv("TERM")
    assert isinstance(progress_for_terminal(), Lines)


def test_ctrl_c_wipes_the_bar_and_says_one_line(box: Box) -> None:
    before = box.snapshot()
    makefile = box.path(SOURCE) / "kernel-open/Makefile"
    text = makefile.read_text()
    makefile.write_text(
        text.replace("\t@cp", "\t@while :; do echo 'LD [M]'; sleep 0.1; done\n\t@cp")
    )
    shows, stderr = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "gpuguard", "--root", box.root, "rebuild"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm"},
        stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, text=True,
    )  # fmt: skip
    os.close(stderr)
    shown = _until(shows, "LD [M]")
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=30)
    shown += _rest(shows)

    assert child.returncode == 128 + signal.SIGINT
    assert "Abort" not in out + shown
    assert shown.endswith(
        "\r\x1b[2Kgpuguard: stopped by SIGINT; what was begun is undone, "
        "or was already complete\r\n"
    )
    makefile.write_text(text)
    assert box.snapshot() == before
    assert box.leftovers() == []


def _until(shows: int, text: str) -> str:
    shown, end = "", time.monotonic() + 30
    while text not in shown and time.monotonic() < end:
        shown += os.read(shows, 4096).decode(errors="replace")
    assert text in shown
    return shown


def _rest(shows: int) -> str:
    shown = b""
    try:
        while data := os.read(shows, 4096):
            shown += data
    except OSError:  # EIO: nobody has the other end any more
        pass
    return shown.decode(errors="replace")
