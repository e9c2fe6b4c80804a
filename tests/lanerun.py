"""The program at work on a host for lanes, and what waiting for it needs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 30.0
Hook = Callable[[str, tuple[Any, ...]], None]
PYNVML = """
import json, os
S = json.load(open(os.path.join(os.path.dirname(__file__), "state.json")))
class NVMLError(Exception): pass
class _O:
    def __init__(self, **v): self.__dict__.update(v)
def nvmlInit(): pass
def nvmlShutdown(): pass
UUIDS = S.get("uuids", ["GPU-0"])
def nvmlDeviceGetCount(): return len(UUIDS)
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetName(h): return "Stand-in"
def nvmlDeviceGetUUID(h): return UUIDS[h]
def nvmlDeviceGetPciInfo(h): return _O(busId="00000000:0%d:00.0" % (h + 1))
def nvmlDeviceGetMemoryInfo(h):
    total = S.get("total", 32 << 30)
    return _O(total=total, used=S["used"], free=total - S["used"])
def nvmlDeviceGetComputeRunningProcesses(h):
    known = S.get("process_bytes", {})
    return [_O(pid=p, usedGpuMemory=known.get(str(p))) for p in S.get("processes", ())]
def nvmlDeviceGetGraphicsRunningProcesses(h): return []
"""


DRIVER = "580.95.05"


class Fakes:
    """What a machine only seems to have: cards, a driver, a proof."""

    root: Path

    def path(self, inside: str) -> Path:
        return self.root / inside.lstrip("/")

    def command(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a program there."""
        raise NotImplementedError

    def pretend(self, place: str, text: str) -> None:
        """Put a text in the place of one of the kernel's files, or of a folder's one file."""
        source = self.root / "srv" / f"kernel-{uuid.uuid4().hex}"
        source.write_text(text)
        done = self.command("mount", "--bind", f"/srv/{source.name}", place)
        assert done.returncode == 0, done.stderr

    def pretend_bus(self, cards: int) -> None:
        """So many cards on the PCI bus."""
        for number in range(cards):
            device = self.path(f"/srv/bus/0000:0{number + 1}:00.0")
            device.mkdir(parents=True)
            (device / "vendor").write_text("0x10de\n")
            (device / "class").write_text("0x030000\n")
        done = self.command("mount", "--bind", "/srv/bus", "/sys/bus/pci/devices")
        assert done.returncode == 0, done.stderr

    def pretend_driver(self, version: str = DRIVER) -> None:
        """A driver that is loaded."""
        folder = self.path("/srv/driver/nvidia")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "version").write_text(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
            f"{version}  Release Build  (builder@host)\n"
        )
        done = self.command("mount", "--bind", "/srv/driver", "/proc/driver")
        assert done.returncode == 0, done.stderr

    def pretend_cards(self, **card: Any) -> None:
        """What NVML says: one card with these values."""
        folder = self.path("/opt/pynvml")
        folder.mkdir(exist_ok=True)
        (folder / "pynvml.py").write_text(PYNVML)
        (folder / "state.json").write_text(json.dumps(card))

    def prove(self, **changes: Any) -> None:
        """A proof of this boot, as the gate leaves it."""
        proof = {
            "schema": 1,
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "created": "2026-01-01T00:00:00Z",
            "verdict": "ok",
            "kernel": os.uname().release,
            "driver": DRIVER,
            "build_id": None,
            "identity": "patched",
            "cards": ["GPU-0", "GPU-1", "GPU-2", "GPU-3"],
            "pairs": 12,
            "source": "nvml",
        }
        file = self.path("/run/gpuguard/proof.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**proof, **changes}))


@dataclass(frozen=True)
class Said:
    """What the program said."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


class Running:
    """The program, at work."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self._folder = folder

    def kill(self, signum: int = signal.SIGKILL) -> None:
        os.kill(self.pid, signum)

    def wait(self) -> Said:
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        said = Said(status, self.text("out"), self.text("err"))
        shutil.rmtree(self._folder)
        return said

    def text(self, name: str) -> str:
        file = self._folder / name
        return file.read_text() if file.exists() else ""

    def says(self, text: str, seconds: float = PATIENCE) -> None:
        """Wait until it has said that, on stderr."""
        wait_for(lambda: text in self.text("err"), text, seconds)


def cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def killer(number: int) -> Hook:
    seen = 0

    def hook(event: str, _arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event == "os.rename":
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def refuser(numbers: range) -> Hook:
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event == "os.rename":
            seen += 1
            if seen in numbers:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), arguments[1])

    return hook


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
    """Poll for something that another process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.02)
