"""What systemd and the journal are told: sd_notify(3), the journal's native protocol."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuguard.host import notify as module
from gpuguard.host.notify import journal, notify, watchdog_seconds


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "socket"))
        found.settimeout(10)
        yield found


def decoded(data: bytes) -> dict[str, str]:
    """https://systemd.io/JOURNAL_NATIVE_PROTOCOL/."""
    found = {}
    while data:
        line, _, rest = data.partition(b"\n")
        name, equals, text = line.partition(b"=")
        if equals:
            found[name.decode()] = text.decode()
            data = rest
            continue
        (length,) = struct.unpack("<Q", rest[:8])
        found[name.decode()] = rest[8 : 8 + length].decode()
        assert rest[8 + length : 9 + length] == b"\n"
        data = rest[9 + length :]
    return found


def test_notify(receiver: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", receiver.getsockname())
    assert notify("READY=1", "STATUS=ok")
    assert receiver.recv(4096) == b"READY=1\nSTATUS=ok"


def test_notify_an_abstract_address(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"gpuguard-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(f"\0{name}")
        found.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        assert notify("WATCHDOG=1")
        assert found.recv(4096) == b"WATCHDOG=1"


@pytest.mark.parametrize("address", [None, "", "relative", "/nowhere/socket"])
def test_nobody_to_notify(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify("READY=1")


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [("3000000", None, 3.0), ("3000000", "own", 3.0), ("3000000", "1", None), ("0", None, None),
     ("soon", None, None), (None, None, None)],
)  # fmt: skip
def test_watchdog(
    usec: str | None, pid: str | None, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if text is not None:
            monkeypatch.setenv(name, str(os.getpid()) if text == "own" else text)
    assert watchdog_seconds() == seconds


def test_journal_fields(
    receiver: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "stderr").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        state = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{state.st_dev}:{state.st_ino}")
        monkeypatch.setattr(module, "JOURNAL_SOCKET", receiver.getsockname())
        journal("verdict from ok to critical", priority="critical", event="verdict-changed")
        journal("two\nlines", detail="a\nb=c\n")
    first, second = decoded(receiver.recv(65536)), decoded(receiver.recv(65536))
    assert first == {
        "MESSAGE": "verdict from ok to critical",
        "PRIORITY": "2",
        "SYSLOG_IDENTIFIER": "gpuguard",
        "GPUGUARD_EVENT": "verdict-changed",
    }
    assert (second["MESSAGE"], second["GPUGUARD_DETAIL"]) == ("two\nlines", "a\nb=c\n")
    assert (tmp_path / "stderr").read_text() == ""  # once, not twice


def test_without_the_journals_socket_a_line_with_a_level(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "stderr").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        state = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{state.st_dev}:{state.st_ino}")
        monkeypatch.setattr(module, "JOURNAL_SOCKET", str(tmp_path / "nowhere"))
        journal("it failed", priority="error")
    assert (tmp_path / "stderr").read_text() == "<3>gpuguard: it failed\n"


def test_in_a_terminal_a_plain_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "8:123456")  # inherited; stderr is something else
    journal("it works", event="whatever")
    assert capfd.readouterr().err == "gpuguard: it works\n"
