"""A real Debian, booted in a container of systemd-nspawn: systemd, D-Bus, logind, apt, dkms.

What the kernel says is pretended, because the real one is the test machine's: a unit of the
root mounts ``/srv/lab/kernel`` over ``/proc/sys/kernel/osrelease``, ``/proc/driver``,
``/sys/module`` and the PCI devices before anything looks. ``boot_loader_starts`` and ``boot``
play firmware and kernel: they read GRUB's real menu and the modules that modprobe would load.
Nothing but loopback is there of a network. Memory limits of units are not enforced.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpuguard.demo.loaded import loadable_modules, unpacked
from tests.booted_end import wait_for_end
from tests.booted_roots import (
    PROGRAM,
    Base,
    Debian,
    build_wheel,
    get_base,
    install_gpuguard,
    overlay,
    pretend_release,
)
from tests.cgroups import remove_cgroups
from tests.grub_menu import grub_environment, started_by_grub
from tests.pretended_bus import add_cards
from tests.realroot import chroot, mounted

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KERNEL = "srv/lab/kernel"
_NUMBERS = itertools.count()
_REBOOT = 133  # exit status of nspawn when the system inside wants to be started again
_UNIT = """\
[Unit]
Description=What the kernel would say
DefaultDependencies=no
Before=sysinit.target systemd-journald.service systemd-modules-load.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=mount --bind /srv/lab/kernel/osrelease /proc/sys/kernel/osrelease
ExecStart=mount --bind /srv/lab/kernel/driver /proc/driver
ExecStart=mount --bind /srv/lab/kernel/module /sys/module
ExecStart=mount --bind /srv/lab/kernel/pci /sys/bus/pci/devices
ExecStart=/srv/lab/nodes
ExecStart=/srv/lab/boot-id
"""
# Units that protect kernel tunables or cgroups get a /proc of their own, without those mounts.
_DROP_IN = """[Service]
BindReadOnlyPaths=/srv/lab/kernel/osrelease:/proc/sys/kernel/osrelease
BindReadOnlyPaths=/srv/lab/kernel/driver:/proc/driver /srv/lab/kernel/module:/sys/module
BindReadOnlyPaths=/srv/lab/kernel/pci:/sys/bus/pci/devices
"""
# Gate and daemon compare boots: without nspawn's mount they would see the machine's.
_DROP_IN_OF_BOOT = """[Service]
BindReadOnlyPaths=/run/lab-boot-id:/proc/sys/kernel/random/boot_id
"""
# nspawn mounts a deleted file there, on which nothing else can be mounted.
_BOOT_ID = """\
#!/bin/sh
at=/proc/sys/kernel/random/boot_id
cp $at /run/lab-boot-id
while umount $at 2>/dev/null; do :; done
exec mount --bind /run/lab-boot-id $at
"""
# Device nodes as udev and nvidia-modprobe make them once the driver has bound its cards.
_NODES = """\
#!/bin/sh
[ -e /proc/driver/nvidia/version ] || exit 0
cd /dev && mknod nvidiactl c 195 255 && mknod nvidia-uvm c 511 0
n=0
for card in /sys/bus/pci/devices/*/vendor; do
    [ -e $card ] && mknod nvidia$n c 195 $n
    n=$((n + 1))
done
"""
# Asks the kernel for the disk below /, which is an overlay here. The menu is the real one.
_GRUB_PROBE = """\
#!/bin/sh
case "$*" in
*target=device*) echo /dev/vda1 ;;
*target=fs_uuid*) echo 0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0 ;;
*target=fs*) echo ext2 ;;
*target=partmap*) echo msdos ;;
*target=compatibility_hint*|*target=hints_string*|*target=bios_hints*) echo hd0,msdos1 ;;
*target=drive*) echo "(hd0,msdos1)" ;;
esac
"""
# Debian's own hook does nothing in a container.
_UPDATE_GRUB = "#!/bin/sh\n[ -e /boot/grub/grub.cfg ] && exec update-grub\n"


class Machine:
    """One system; made by ``machine``, which ends it on every way out."""

    def __init__(
        self, root: Path, base: Base, name: str, folder: Path, options: tuple[str, ...] = ()
    ) -> None:
        self.root = root
        self.base = base
        self.name = name
        self._options = options
        self._console = folder / "console"
        self._nspawn: subprocess.Popen[bytes] | None = None

    # --- power

    def boot(self, release: str) -> None:
        """Start with a kernel, and wait until start-up is finished, in whatever state."""
        self._load(release)
        with self._console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                ["setpriv", "--pdeathsig=TERM",  # killed tests: nspawn powers the system off
                 "/bin/sh", "-c", _ON_ITS_OWN, self.name,
                 "systemd-nspawn", "-q", "-D", str(self.root), "-b", "-M", self.name,
                 "--register=no", "--keep-unit", "--resolv-conf=off", "--console=pipe",
                 *self._options],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )  # fmt: skip
        self.wait_for(self._answers, 60, "systemd answers")
        self.run("systemctl", "is-system-running", "--wait", check=False, timeout=300)

    def reboot(self, *options: str, timeout: float = 120) -> str:
        """Ask for a restart and start what the boot loader's menu says; the kernel's release."""
        self.run("systemctl", "reboot", *options, check=False)
        return self.come_back(timeout)

    def come_back(self, timeout: float = 120) -> str:
        """Wait for the end of a boot that was asked to restart; start the next one."""
        assert self._nspawn is not None
        status = wait_for_end(self._nspawn, timeout)
        assert status == _REBOOT, f"nspawn exited with {status}\n{self.console()}"
        self._nspawn = None
        release = self.boot_loader_starts()
        self.boot(release)
        return release

    def power_off(self) -> None:
        """End it: as asked for, else by force."""
        if self._nspawn is None:
            return
        with suppress(subprocess.SubprocessError, AssertionError, OSError):
            self.run("systemctl", "poweroff", "--force", check=False, timeout=20)
            wait_for_end(self._nspawn, 30)
        self.cut_power()

    def cut_power(self) -> None:
        """As if the plug were pulled: every process inside is killed."""
        if self._nspawn is None:
            return
        if self._nspawn.poll() is None:
            with suppress(ProcessLookupError, AssertionError):
                os.kill(self._leader(), signal.SIGKILL)  # its namespace dies with it
            with suppress(subprocess.TimeoutExpired):
                self._nspawn.wait(10)
            self._nspawn.kill()
            self._nspawn.wait()
        self._nspawn = None

    @contextmanager
    def without_cards(self) -> Iterator[None]:
        """From the next boot on there is no card, until a boot after the block."""
        bus = self.root / _KERNEL / "pci"
        away = bus.with_name("pci-away")
        away.mkdir()
        for card in bus.iterdir():
            card.rename(away / card.name)
        try:
            yield
        finally:
            for card in away.iterdir():
                card.rename(bus / card.name)
            away.rmdir()

    @property
    def is_running(self) -> bool:
        return self._nspawn is not None and self._nspawn.poll() is None

    def boot_loader_starts(self) -> str:
        """The release that GRUB's menu starts without a key press; uses up a one-time choice."""
        saved = grub_environment(self.root)
        if once := saved.get("next_entry"):
            chroot(self.root, "grub-editenv", "/boot/grub/grubenv", "unset", "next_entry")
        menu = (self.root / "boot/grub/grub.cfg").read_text()
        return started_by_grub(menu, once or "", saved.get("saved_entry", ""))

    # --- what is done inside

    def run(
        self, *argv: str, timeout: float = 60, check: bool = True, user: str = "", text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """A program inside, as root unless an account is named; its output is kept."""
        with self.start(*argv, user=user) as child:
            try:
                out, err = child.communicate(text, timeout)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                raise
        done = subprocess.CompletedProcess(argv, child.returncode, out, err)
        if check and done.returncode != 0:
            raise AssertionError(f"{argv} exited with {done.returncode}:\n{out}\n{err}")
        return done

    def start(self, *argv: str, user: str = "") -> subprocess.Popen[str]:
        """As ``run``, not waited for."""
        words = ("runuser", "-u", user, "--", *argv) if user else argv
        return subprocess.Popen(
            ["nsenter", "-t", str(self._leader()), "-a", "env", "-i", f"PATH={_PATH}",
             "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive", "HOME=/root", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def apt(self, *words: str, check: bool = True, timeout: float = 300) -> str:
        """apt-get; all that it and dpkg printed."""
        done = self.run("apt-get", "-y", *words, check=check, timeout=timeout)
        return done.stdout + done.stderr

    def gpuguard(
        self, *words: str, check: bool = False, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        return self.run(PROGRAM, *words, check=check, timeout=timeout)

    def status(self) -> dict[str, Any]:
        done = self.gpuguard("--json", "status")
        assert done.stdout, done.stderr
        return dict(json.loads(done.stdout))

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.run("systemctl", *words, check=check).stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.systemctl("show", "-P", name, unit)

    def journal(self, *words: str) -> str:
        """Messages of this boot: ``journal("-u", "x.service")``."""
        return self.run("journalctl", "--no-pager", "-q", "-o", "cat", "-b", *words).stdout

    def wait_for(self, condition: Callable[[], object], timeout: float, what: str) -> None:
        """Until a condition holds.

        Raises:
            AssertionError: it did not within so many seconds; with what the journal says.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                said = self.journal("-n", "40") if self._children() else self.console()
                raise AssertionError(f"not within {timeout:g} s: {what}\n{said}")
            time.sleep(0.2)

    def path(self, inside: str) -> Path:
        """A file of the root; what is mounted inside, /run for one, is not there."""
        return self.root / inside.lstrip("/")

    def live_path(self, inside: str) -> Path:
        """A file as the processes inside see it now."""
        return Path(f"/proc/{self._leader()}/root", inside.lstrip("/"))

    def console(self) -> str:
        return self._console.read_text(errors="replace")[-4000:] if self._console.exists() else ""

    # --- the parts behind

    def _load(self, release: str) -> None:
        """What a kernel would say after it has loaded the driver's modules that it finds."""
        pretend_release(self.root, release)
        for name in ("driver", "module"):
            shutil.rmtree(self.root / _KERNEL / name, ignore_errors=True)
            (self.root / _KERNEL / name).mkdir()
        modules = loadable_modules(self.root, release)
        for name, module in modules.items():
            folder = self.root / _KERNEL / "module" / name.replace("-", "_")
            (folder / "notes").mkdir(parents=True)
            (folder / "notes/.note.gnu.build-id").write_bytes(module.build_id_note)
            (folder / "version").write_text(f"{module.version}\n")
            (folder / "srcversion").write_text(f"{module.srcversion}\n")
            (folder / "initstate").write_text("live\n")
            (folder / "refcnt").write_text("0\n")
            if name == "nvidia":
                (folder / "parameters").mkdir()
                (folder / "parameters/standin_p2p_policy").write_text(_policy_in(module.path))
        if "nvidia" in modules:
            driver = self.root / _KERNEL / "driver/nvidia"
            driver.mkdir()
            (driver / "version").write_text(
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
                f"{modules['nvidia'].version}  Release Build  (gpuguard@test)\n"
            )

    def _answers(self) -> bool:
        assert self._nspawn is not None
        assert self._nspawn.poll() is None, f"it ended while it started\n{self.console()}"
        if not self._children():
            return False
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() not in (
            "", "offline", "unknown",
        )  # fmt: skip

    def _children(self) -> list[str]:
        assert self._nspawn is not None
        pid = self._nspawn.pid
        with suppress(OSError):
            return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return []

    def _leader(self) -> int:
        """The pid of the container's init, in the test machine's numbers."""
        children = self._children()
        assert children, f"the system is not running\n{self.console()}"
        return int(children[0])


# A cgroup of its own, or a second container fails with "payload subcgroup busy". A network of
# its own, so that ports inside are free; nspawn's own option for that takes /sys/module away.
_ON_ITS_OWN = """\
for at in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
    [ -e $at/cgroup.procs ] && mkdir -p $at/$0 && echo $$ >$at/$0/cgroup.procs
done
exec unshare --net sh -c 'ip link set lo up; exec "$@"' sh "$@"
"""


@contextmanager
def machine(root: Path, base: Base, folder: Path, *options: str) -> Iterator[Machine]:
    """Make a root bootable, with options of nspawn; whatever was started in it ends with it."""
    name = f"gpuguard-{base.debian.suite}-{os.getpid()}-{next(_NUMBERS)}"
    _furnish(root)
    system = Machine(root, base, name, folder, options)
    try:
        yield system
    finally:
        system.power_off()
        remove_cgroups(name)


def _furnish(root: Path) -> None:
    add_cards(root / _KERNEL / "pci", 4)
    unit = root / "etc/systemd/system/lab-kernel.service"
    unit.write_text(_UNIT)
    wants = unit.parent / "sysinit.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / unit.name).symlink_to(f"../{unit.name}")
    for prefix in ("gpuguard", "gpuguard-"):
        drop_in = unit.with_name(f"{prefix}.service.d") / "lab-kernel.conf"
        drop_in.parent.mkdir()
        drop_in.write_text(_DROP_IN)
    for name in ("gpuguard", "gpuguard-verify", "gpuguard-lane-resume"):
        boot = unit.with_name(f"{name}.service.d") / "lab-boot.conf"
        boot.parent.mkdir(exist_ok=True)
        boot.write_text(_DROP_IN_OF_BOOT)
    for kind in ("postinst", "postrm"):
        _script(root / f"etc/kernel/{kind}.d/zzz-update-grub-in-container", _UPDATE_GRUB)
    _script(root / "srv/lab/nodes", _NODES)
    _script(root / "srv/lab/boot-id", _BOOT_ID)
    with mounted(root):
        chroot(root, "dpkg-divert", "--local", "--rename", "--add", "/usr/sbin/grub-probe")
        _script(root / "usr/sbin/grub-probe", _GRUB_PROBE)
        chroot(root, "update-grub")


def _script(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def _policy_in(module: Path) -> str:
    with unpacked(module) as plain:
        found = re.search(rb"standin-p2p-policy=[\w-]+", plain.read_bytes())
    return f"{found[0].decode()}\n" if found else ""


@contextmanager
def prepared(debian: Debian, folder: Path) -> Iterator[Machine]:
    """A machine that runs its older kernel; gpuguard is there as pip installs it, and idle."""
    base = get_base(debian)
    with overlay(base.layers, folder) as root:
        install_gpuguard(root, build_wheel(folder))
        with machine(root, base, folder) as system:
            system.boot(base.old)
            yield system
