"""A real Debian as a virtual machine: GRUB, its own kernel, real module loading, real reboots.

QEMU emulates the processor in software, so nothing but the program is needed, and a boot takes
most of a minute. The disk is made from the roots of ``booted_roots``. Cards, which no emulator
has, are pretended to those who look at the PCI bus; the module that is loaded is a real one.
The guest answers on a forwarded loopback port what it is asked.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.booted_roots import PROGRAM
from tests.realroot import chroot

_LABEL = "labroot"
_SECTOR, _FIRST = 512, 2048
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "DEBIAN_FRONTEND": "noninteractive",
    "LC_ALL": "C.UTF-8",
    "HOME": "/root",
}
_DISK_BYTES = 6 << 30
_REPORT_PORT = 8022
_GRUB = f"""\
GRUB_DEFAULT=0
GRUB_TIMEOUT=0
GRUB_DISTRIBUTOR=Debian
GRUB_CMDLINE_LINUX="root=LABEL={_LABEL} console=ttyS0,115200 mitigations=off nokaslr audit=0"
GRUB_TERMINAL=serial
GRUB_DISABLE_OS_PROBER=true
"""
_CARDS = """\
[Unit]
Description=Cards on the PCI bus, and their device nodes
After=systemd-modules-load.service
Before=gpuguard-verify.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/srv/lab/nodes

[Install]
WantedBy=multi-user.target
"""
# Late, as udev makes them: only once the driver is in.
_NODES = """\
#!/bin/sh
[ -e /proc/driver/nvidia/version ] || exit 0
cd /dev && mknod nvidiactl c 195 255
for n in 0 1 2 3; do mknod nvidia$n c 195 $n; done
"""
# Units with a /sys of their own, and everybody else.
_DROP_IN = "[Service]\nBindReadOnlyPaths=/srv/lab/pci:/sys/bus/pci/devices\n"
_SERVING = """\
[Unit]
Description=Serves from the GPUs
Requires=gpuguard-verify.service
After=gpuguard-verify.service

[Service]
ExecStart=/usr/bin/python3 -m http.server --bind 127.0.0.1 8000

[Install]
WantedBy=multi-user.target
"""
_REPORT_UNIT = """\
[Unit]
Description=Tells the test what it asks
After=network.target

[Service]
ExecStart=/usr/bin/python3 /srv/lab/report.py
StandardOutput=journal+console
StandardError=journal+console

[Install]
WantedBy=multi-user.target
"""
_REPORT = f"""\
import http.server, json, subprocess

def run(*words):
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()

def state(unit):
    return run("systemctl", "show", "-P", "ActiveState", unit)

def note():
    try:
        with open("/sys/module/nvidia/notes/.note.gnu.build-id", "rb") as file:
            return file.read()[16:].hex()
    except OSError:
        return None

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/poweroff":
            answer = run("systemctl", "poweroff", "--no-block")
        elif self.path == "/status":
            answer = run("{PROGRAM}", "--json", "status")
        elif self.path == "/journal":
            answer = run("journalctl", "-b", "--no-pager", "-o", "short-monotonic")
        else:
            answer = json.dumps({{
                "kernel": run("uname", "-r"), "build_id": note(),
                "gate": state("gpuguard-verify.service"), "serving": state("serving.service"),
                "multi_user": state("multi-user.target"), "daemon": state("gpuguard.service"),
                "queue": state("gpuguard-rebuild.service"),
            }})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer.encode())

http.server.HTTPServer(("0.0.0.0", {_REPORT_PORT}), Handler).serve_forever()
"""


class Disk:
    """A file with a partition table, GRUB, and one file system."""

    def __init__(self, image: Path) -> None:
        self.image = image

    @contextmanager
    def mounted(self) -> Iterator[Mounted]:
        """The file system, for changes between boots.

        In a mount namespace of its own: a container that starts meanwhile would copy the mount,
        and keep the file system in use for as long as it runs.
        """
        mount = self.image.with_name("mnt")
        mount.mkdir(exist_ok=True)
        with ExitStack() as undo:
            keeper = undo.enter_context(_namespace())
            device = _run("losetup", "-f", "--show", str(self.image)).strip()
            undo.callback(_run, "losetup", "-d", device)
            _run("partx", "-a", device)  # a kernel need not parse the tables of loop devices
            undo.callback(_run, "partx", "-d", device)
            inside = ("nsenter", "-t", str(keeper), "-m", "--")
            _run(*inside, "mount", f"{device}p1", str(mount))
            undo.callback(_run, *inside, "umount", "-R", str(mount))
            for kind in ("dev", "proc", "sys"):
                _run(*inside, "mount", "--rbind", f"/{kind}", str(mount / kind))
            yield Mounted(
                Path(f"/proc/{keeper}/root{mount}"), device, (*inside, "chroot", str(mount))
            )


@dataclass(frozen=True)
class Mounted:
    """The file system of a disk that does not run; ``root`` is where this process sees it."""

    root: Path
    device: str
    enter: tuple[str, ...]

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A program inside, as root; its output is kept."""
        done = subprocess.run(
            [*self.enter, *argv], env=_ENVIRONMENT, capture_output=True, text=True,
            timeout=900, check=False,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(
                f"{argv} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done


@contextmanager
def _namespace() -> Iterator[int]:
    """The pid of a process that keeps a mount namespace."""
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo there; exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as keeper:  # fmt: skip
        assert keeper.stdout is not None
        keeper.stdout.readline()
        try:
            yield keeper.pid
        finally:
            keeper.kill()


def make_disk(root: Path, folder: Path) -> Disk:
    """A disk that boots from GRUB, with everything that is in a root."""
    _furnish(root)
    disk = Disk(folder / "disk")
    with disk.image.open("wb") as file:
        file.truncate(_DISK_BYTES)
    table = f"start={_FIRST}, type=83, bootable"
    _run("sfdisk", "-q", "--label", "dos", str(disk.image), text=table)
    size = _DISK_BYTES - _FIRST * _SECTOR
    _run(
        "mke2fs", "-q", "-t", "ext4", "-L", _LABEL, "-d", str(root),
        "-E", f"offset={_FIRST * _SECTOR}", str(disk.image), f"{size >> 10}k",
    )  # fmt: skip
    with disk.mounted() as there:
        there.run("grub-install", "--target=i386-pc", there.device)
        there.run("update-grub")
    return disk


def _furnish(root: Path) -> None:
    (root / "usr/local/bin/uname").unlink(missing_ok=True)  # here a kernel of its own answers
    (root / "etc/fstab").write_text(f"LABEL={_LABEL} / ext4 defaults 0 1\n")
    (root / "etc/default/grub").write_text(_GRUB)
    (root / "etc/modules-load.d/nvidia.conf").write_text("nvidia\nnvidia-uvm\n")
    network = root / "etc/systemd/network/lab.network"
    network.write_text("[Match]\nType=ether\n\n[Network]\nDHCP=ipv4\n")
    for number in range(1, 5):
        card = root / f"srv/lab/pci/0000:{number:02x}:00.0"
        card.mkdir(parents=True)
        for name, value in (("vendor", "0x10de"), ("device", "0x2b85"), ("class", "0x030000")):
            (card / name).write_text(f"{value}\n")
    (root / "srv/lab/nodes").write_text(_NODES)
    (root / "srv/lab/nodes").chmod(0o755)
    (root / "srv/lab/report.py").write_text(_REPORT)
    units = root / "etc/systemd/system"
    for name, text in (
        ("lab-cards.service", _CARDS), ("serving.service", _SERVING),
        ("lab-report.service", _REPORT_UNIT),
    ):  # fmt: skip
        (units / name).write_text(text)
    for prefix in ("gpuguard", "gpuguard-"):
        drop_in = units / f"{prefix}.service.d/lab.conf"
        drop_in.parent.mkdir()
        drop_in.write_text(_DROP_IN)
    ours = ("lab-cards.service", "serving.service", "lab-report.service")
    chroot(root, "systemctl", "enable", "-q", "systemd-networkd.service", *ours)
    chroot(root, "systemctl", "mask", "-q", "systemd-networkd-wait-online.service")


class Guest:
    """A virtual machine that runs."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, serial: Path) -> None:
        self._process, self._port, self._serial = process, port, serial

    def ask(self, path: str = "/", timeout: float = 60) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self._port}{path}", timeout=timeout) as answer:
            return str(answer.read().decode())

    def report(self, timeout: float) -> dict[str, Any]:
        """What is loaded and what runs, once the gate has said its word.

        Raises:
            AssertionError: it has not within so many seconds; with the end of the serial console.
        """
        deadline, report = time.monotonic() + timeout, dict[str, Any]()
        while report.get("gate") not in ("active", "failed"):
            assert self._process.poll() is None, f"QEMU has ended\n{self._console()}"
            assert time.monotonic() < deadline, f"{report or 'no answer'}\n{self._console()}"
            time.sleep(0.5)
            with suppress(OSError, ValueError):
                report = json.loads(self.ask(timeout=10))
        return report

    def wait_for(self, key: str, value: str, timeout: float = 180) -> None:
        """Until the report says so."""
        deadline = time.monotonic() + timeout
        while json.loads(self.ask())[key] != value:
            assert time.monotonic() < deadline, self.ask("/journal")
            time.sleep(0.5)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.ask("/status", timeout=120)))

    def power_off(self) -> None:
        """Shut down in order: what was written must be on the disk."""
        self.ask("/poweroff")
        assert self._process.wait(180) == 0, self._console()

    def _console(self) -> str:
        text = self._serial.read_text(errors="replace") if self._serial.exists() else ""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)[-4000:]


@contextmanager
def boot(disk: Disk, serial: Path, *, snapshot: bool = False) -> Iterator[Guest]:
    """Start the disk; whatever happens, the emulator ends with the block.

    ``snapshot``: what the guest writes is thrown away.
    """
    port = _free_port()
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig=KILL",  # also when the tests are killed
         "qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=1024", "-machine", "q35",
         "-cpu", "Nehalem", "-smp", "2", "-m", "2048", "-display", "none", "-serial",
         f"file:{serial}", "-no-reboot", "-drive",
         f"file={disk.image},if=virtio,format=raw,cache=unsafe", "-device", "virtio-rng-pci",
         "-nic", f"user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{port}-:{_REPORT_PORT}",
         *(("-snapshot",) if snapshot else ())],
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield Guest(process, port, serial)
    finally:
        process.kill()
        process.wait()


def missing() -> str | None:
    """Why no virtual machine can be run here, with what helps."""
    for program, package in (
        ("qemu-system-x86_64", "qemu-system-x86"), ("sfdisk", "fdisk"), ("mke2fs", "e2fsprogs"),
    ):  # fmt: skip
        if shutil.which(program) is None:
            return f"apt-get install {package}"
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{command} exited with {done.returncode}: {done.stderr}")
    return done.stdout
