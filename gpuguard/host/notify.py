"""Tell systemd and the journal: datagrams of sd_notify(3) and of the journal's native protocol.

Both protocols are stable and small; no library is needed. Without systemd nothing happens.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

JOURNAL_SOCKET = "/run/systemd/journal/socket"
_PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "notice": 5, "info": 6}


def notify(*lines: str) -> bool:
    """Send one state to the service manager (``READY=1``, ``STATUS=…``); False: there is none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    return _send(address, "\n".join(lines).encode())


def watchdog_seconds() -> float | None:
    """How often systemd wants to hear from us; None: it does not ask."""
    try:
        seconds = int(os.environ["WATCHDOG_USEC"]) / 1e6
        mine = int(os.environ.get("WATCHDOG_PID", os.getpid())) == os.getpid()
    except (KeyError, ValueError):
        return None
    return seconds if mine and seconds > 0 else None


def journal(message: str, *, priority: str = "info", **fields: str) -> None:
    """Log one event with fields of its own (``journalctl -o json``), else a line to stderr.

    Args:
        message: one line for a person.
        priority: ``critical``, ``error``, ``warning``, ``notice`` or ``info``.
        **fields: further journal fields; names are written in upper case after ``GPUGUARD_``.
    """
    number = str(_PRIORITIES[priority])
    entry = {
        "MESSAGE": message,
        "PRIORITY": number,
        "SYSLOG_IDENTIFIER": "gpuguard",
        **{f"GPUGUARD_{name.upper()}": value for name, value in fields.items()},
    }
    logged = _stderr_is_logged()
    if logged and _send(JOURNAL_SOCKET, _encoded(entry)):
        return
    prefix = f"<{number}>" if logged else ""  # sd-daemon(3)
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{prefix}gpuguard: {message}\n")
        sys.stderr.flush()


def _stderr_is_logged() -> bool:
    """Whether stderr ends in the journal; the variable alone is inherited by shells, too."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        there = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return (str(there.st_dev), str(there.st_ino)) == (device, inode)


def _encoded(entry: dict[str, str]) -> bytes:
    """``NAME=value``, or name, length and value where the value has several lines."""
    parts = []
    for name, value in entry.items():
        data = value.encode("utf-8", "backslashreplace")
        if b"\n" in data:
            parts.append(name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n")
        else:
            parts.append(name.encode() + b"=" + data + b"\n")
    return b"".join(parts)


def _send(address: str, data: bytes) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            # a journal that is stuck must not stop us
            sender.sendto(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, address)
    except OSError:
        return False
    return True
