"""What goes wrong on a live system, in a booted Debian: locks, kills, full disks, others' modules.

Stages of one story, one machine per release of Debian, in this order. Each fault is made for
real; what counts is what systemd, apt and the module tree say afterwards.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuguard.demo.source import copy_standin
from tests.booted import Machine
from tests.booted_roots import CLONE, CONFIG, PROGRAM, RELEASES
from tests.booted_story import (
    QUEUE,
    REBUILD,
    driver_files,
    is_idle,
    kernel,
    kernel_files,
    offer,
    story_machine,
    wait_until_idle,
    wait_until_ready,
)
from tests.standin_packages import BROKEN_PACKAGE, VERSIONS

pytestmark = pytest.mark.slow

BUILT = "patched modules built and in place"
BUILDING = "modules: nvidia, "  # the step that compiles
GATE = "gpuguard-verify.service"


@pytest.fixture(scope="module", params=RELEASES, ids=lambda debian: debian.suite)
def system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp(f"faults-{request.param.suite}")
    for machine in story_machine(request.param, folder):
        done = machine.gpuguard("setup")
        assert done.returncode == 0, done.stdout + done.stderr
        done = machine.gpuguard("rebuild")
        assert done.returncode == 0, done.stdout + done.stderr
        quick = machine.path(f"/etc/systemd/system/{REBUILD}.d/quick.conf")
        quick.parent.mkdir()
        quick.write_text("[Service]\nRestartSec=2s\n")
        machine.reboot()
        wait_until_idle(machine)
        yield machine


class Since:
    """The journal of a unit from now on."""

    def __init__(self, system: Machine, unit: str = REBUILD) -> None:
        self._system, self._unit = system, unit
        done = system.run("journalctl", "-q", "-n0", "--show-cursor").stdout
        self._cursor = done.partition("cursor: ")[2].strip()

    def text(self) -> str:
        return self._system.journal("-u", self._unit, f"--after-cursor={self._cursor}")

    def count(self, text: str) -> int:
        return self.text().count(text)

    def wait_for(self, text: str, timeout: float = 60) -> None:
        self._system.wait_for(lambda: text in self.text(), timeout, f"{self._unit} says {text!r}")


def lose_the_patch(system: Machine) -> None:
    """The running kernel's patched modules are gone, as after a restored backup of /lib."""
    release = system.base.old
    system.run("rm", "-r", f"/lib/modules/{release}/updates/gpuguard")
    system.run("depmod", release)
    assert kernel(system, release)["ready"] is False


def trigger(system: Machine) -> None:
    system.run("touch", QUEUE)


def test_fifty_triggers_in_a_second_are_one_rebuild(system: Machine) -> None:
    lose_the_patch(system)
    since = Since(system)
    system.run("sh", "-c", f"for n in $(seq 50); do touch {QUEUE}; sleep 0.02; done")
    wait_until_ready(system, system.base.old)
    assert since.count(BUILT) == 1
    assert since.count("Starting gpuguard-rebuild.service") <= 3


def test_two_triggers_at_once_are_one_rebuild(system: Machine) -> None:
    lose_the_patch(system)
    since = Since(system)
    by_hand = system.start(PROGRAM, "rebuild")
    trigger(system)
    out, err = by_hand.communicate(timeout=120)
    assert by_hand.returncode == 0, out + err
    wait_until_ready(system, system.base.old)
    assert since.count(BUILT) + out.count(f"{system.base.old}: patched in ") == 1


def test_a_run_waits_for_dpkg_and_keeps_the_request(system: Machine) -> None:
    lose_the_patch(system)
    lock = (
        "import fcntl; f = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
    )
    other = system.start("python3", "-c", f"{lock}; print('locked', flush=True); input()")
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    since = Since(system)
    trigger(system)
    # it has read the configuration and stands before the lock: nothing of a build can be seen
    system.wait_for(lambda: _has_begun(system), 60, "it waits")
    assert system.path(QUEUE).exists()
    assert system.show(REBUILD, "ActiveState") == "activating"
    assert kernel(system, system.base.old)["ready"] is False
    other.communicate("\n", timeout=20)
    wait_until_ready(system, system.base.old)
    assert since.count(BUILT) == 1


def _has_begun(system: Machine) -> bool:
    """True while a run holds gpuguard's lock."""
    return system.run("flock", "-n", "/var/lib/gpuguard/lock", "true", check=False).returncode != 0


@pytest.mark.parametrize("moment", ["core: core objects", BUILDING, "install: into "])
def test_kill_9_in_the_middle_of_a_rebuild(system: Machine, moment: str) -> None:
    lose_the_patch(system)
    since = Since(system)
    trigger(system)
    since.wait_for(moment)
    system.systemctl("kill", "--kill-who=main", "-s", "KILL", REBUILD)
    # systemd ends what is left of it, and starts it again by itself
    since.wait_for("Scheduled restart job")
    assert system.run("pgrep", "-u", "gpuguard-build", check=False).stdout == ""
    wait_until_ready(system, system.base.old)
    assert since.count(BUILT) <= 1  # none: it was killed after the last step
    assert not system.path("/var/lib/gpuguard/journal.jsonl").exists()
    assert list(system.path("/var/cache/gpuguard/staging").glob("*")) == []


def test_a_reboot_is_refused_with_our_reason_while_modules_are_built(system: Machine) -> None:
    lose_the_patch(system)
    since = Since(system)
    trigger(system)
    since.wait_for(BUILDING)
    if system.base.debian.number == "13":  # from systemd 257 on logind refuses root, too
        assert system.run("systemctl", "reboot", check=False).returncode != 0
    done = system.run("systemctl", "reboot", "--check-inhibitors=yes", check=False)
    assert done.returncode != 0
    assert f"patched NVIDIA modules are being built for {system.base.old}" in done.stderr
    wait_until_ready(system, system.base.old)
    assert system.is_running


def test_roots_own_reboot_waits_for_the_build(system: Machine) -> None:
    lose_the_patch(system)
    since = Since(system)
    trigger(system)
    since.wait_for(BUILDING)
    if system.base.debian.number == "13":  # without polkit nothing but --force overrides a lock
        assert system.run("systemctl", "reboot", "-i", check=False).returncode != 0
        wait_until_ready(system, system.base.old)
    system.run("systemctl", "reboot", check=False)
    assert system.come_back() == system.base.old
    assert kernel(system, system.base.old)["ready"] is True


def test_full_boot_changes_nothing_and_says_so(system: Machine) -> None:
    release = system.base.old
    lose_the_patch(system)
    modules = system.path("/etc/initramfs-tools/modules")
    listed = modules.read_text()
    modules.write_text(f"{listed}nvidia\n")
    system.run("update-initramfs", "-u", "-k", release, timeout=120)
    for line in (
        "cp -a /boot /root/boot", "mount -t tmpfs -o size=64m boot /boot",
        "cp -a /root/boot/. /boot", "cat /dev/zero >/boot/full 2>/dev/null || true",
    ):  # fmt: skip
        system.run("sh", "-c", line)
    image = system.live_path(f"/boot/initrd.img-{release}").read_bytes()
    trigger(system)
    wait_until_idle(system)
    assert system.show(REBUILD, "Result") == "exit-code"
    assert system.live_path(f"/boot/initrd.img-{release}").read_bytes() == image
    last = json.loads(system.path("/var/lib/gpuguard/last-run.json").read_text())
    assert "/boot" in json.dumps(last["kernels"]), last
    assert kernel(system, release)["ready"] is False
    system.run("umount", "/boot")
    trigger(system)
    wait_until_ready(system, release)
    assert "updates/gpuguard/nvidia.ko" in system.run(
        "lsinitramfs", f"/boot/initrd.img-{release}"
    ).stdout  # fmt: skip
    modules.write_text(listed)
    system.run("update-initramfs", "-u", "-k", release, timeout=120)


def test_apt_works_when_the_program_is_gone_and_its_hooks_are_not(system: Machine) -> None:
    gone = system.path(PROGRAM)
    gone.rename(gone.with_suffix(".away"))
    try:
        offer(system, *driver_files(VERSIONS[0]))
        said = system.apt("install", "--reinstall", "nvidia-driver")
        assert "gpuguard" not in said
        trigger(system)
        wait_until_idle(system)
    finally:
        gone.with_suffix(".away").rename(gone)
    system.systemctl("reset-failed")
    assert system.systemctl("is-active", "gpuguard-rebuild.path") == "active"


HANGING_SMI = "#!/bin/sh\ntrap '' TERM INT\nsleep 1000 &\nwhile :; do sleep 1000; done\n"


def test_nvidia_smi_that_hangs_does_not_hold_the_gate_up(system: Machine) -> None:
    with hanging_nvidia_smi(system):
        system.systemctl("stop", GATE)
        began = time.monotonic()
        system.systemctl("start", GATE, check=False)
        assert time.monotonic() - began < 120  # it has a limit at all
        assert system.run("pgrep", "-f", "nvidia-smi", check=False).stdout == ""
    system.systemctl("reset-failed")


def test_kill_9_of_the_gate_leaves_no_process_and_it_can_be_started_again(system: Machine) -> None:
    with hanging_nvidia_smi(system):
        system.systemctl("stop", GATE)
        system.systemctl("start", "--no-block", GATE)
        system.wait_for(
            lambda: system.run("pgrep", "-f", "nvidia-smi", check=False).stdout, 60, "it asks"
        )
        system.systemctl("kill", "--kill-who=main", "-s", "KILL", GATE)
        system.wait_for(lambda: system.show(GATE, "ActiveState") == "failed", 60, "it is dead")
        assert system.run("pgrep", "-f", "nvidia-smi", check=False).stdout == ""
        assert not system.live_path("/run/gpuguard/proof.json").exists()
    system.systemctl("start", GATE)
    assert system.live_path("/run/gpuguard/proof.json").exists()


def test_kill_9_of_the_daemon_is_over_in_seconds(system: Machine) -> None:
    system.systemctl("kill", "--kill-who=main", "-s", "KILL", "gpuguard.service")
    system.wait_for(
        lambda: (
            system.show("gpuguard.service", "ActiveState") == "active"
            and system.show("gpuguard.service", "NRestarts") == "1"
        ),
        60,
        "it is back",
    )


@contextmanager
def hanging_nvidia_smi(system: Machine) -> Iterator[None]:
    smi = system.path("/usr/bin/nvidia-smi")
    smi.write_text(HANGING_SMI)
    smi.chmod(0o755)
    try:
        yield
    finally:
        smi.unlink()


def test_no_card_at_all_shuts_the_gate_and_nothing_else(system: Machine) -> None:
    system.path("/etc/gpuguard/gpuguard.yaml").write_text(f"{CONFIG}gate:\n  wait_seconds: 2\n")
    serving = system.path("/etc/systemd/system/serving.service")
    serving.write_text(
        f"[Unit]\nRequires={GATE}\nAfter={GATE}\n[Service]\nType=oneshot\nExecStart=true\n"
        "RemainAfterExit=yes\n[Install]\nWantedBy=multi-user.target\n"
    )
    system.systemctl("enable", "serving")
    with system.without_cards():
        system.reboot()
        system.wait_for(lambda: system.show(GATE, "ActiveState") == "failed", 60, "gate is shut")
        system.wait_for(
            lambda: system.show("serving", "ActiveState") == "inactive", 20, "serving gave up"
        )
        assert system.show("multi-user.target", "ActiveState") == "active"
        assert "gate shut" in system.journal("-u", GATE)
    system.reboot()
    system.wait_for(lambda: system.show(GATE, "ActiveState") == "active", 60, "gate is open")
    system.wait_for(lambda: system.show("serving", "ActiveState") == "active", 20, "serving runs")
    system.path("/etc/gpuguard/gpuguard.yaml").write_text(CONFIG)


def test_a_kernel_that_somebody_elses_module_leaves_half_configured(system: Machine) -> None:
    new = system.base.new
    offer(
        system,
        *kernel_files(system),
        *driver_files(VERSIONS[0]),
        f"{BROKEN_PACKAGE}_1.0-1_amd64.deb",
    )
    system.apt("install", BROKEN_PACKAGE)
    said = system.apt("install", f"linux-image-{new}", f"linux-headers-{new}", check=False)
    state = system.run("dpkg-query", "-W", "-f", "${db:Status-Status}", f"linux-image-{new}").stdout
    assert state == "half-configured", said
    assert said.count("\ngpuguard: ") == 1, said
    system.wait_for(lambda: is_idle(system) and _is_patched(system, new), 240, f"{new} is patched")
    status = system.status()
    finding = next(f for f in status["findings"] if f["code"] == "kernel-unconfigured")
    assert finding["subject"] == new
    assert "dpkg --configure -a" in finding["remedy"]
    system.apt("purge", BROKEN_PACKAGE, check=False)
    system.run("dpkg", "--configure", "-a", timeout=120)
    wait_until_ready(system, new)
    assert system.status()["reboot"]["safe"] is True
    system.apt("purge", f"linux-image-{new}", f"linux-headers-{new}")
    wait_until_idle(system)


def _is_patched(system: Machine, release: str) -> bool:
    modules = kernel(system, release).get("modules", [])
    return bool(modules) and {m["identity"] for m in modules} == {"patched"}


def test_a_kernel_for_which_the_build_fails_is_red_and_holds_the_reboot(
    system: Machine, tmp_path: Path
) -> None:
    new, old = system.base.new, system.base.old
    _add_breaking_patch(system, tmp_path)
    offer(system, *kernel_files(system), *driver_files(VERSIONS[0]))
    system.apt("install", f"linux-image-{new}", f"linux-headers-{new}")
    system.wait_for(
        lambda: is_idle(system) and system.show(REBUILD, "Result") == "exit-code", 240, "it failed"
    )
    assert "this kernel is too new" in system.journal("-u", REBUILD)
    status = system.status()
    assert status["verdict"] == "critical"
    assert status["next_kernel"]["release"] == new
    failed = next(f for f in status["findings"] if f["code"] == "build-failed")
    assert failed["subject"] == new
    assert f"boot {old}" in failed["remedy"]
    assert system.show("gpuguard-hold-reboot.service", "ActiveState") == "active"
    done = system.run("systemctl", "reboot", "--check-inhibitors=yes", check=False)
    assert done.returncode != 0
    assert "the next boot would lose P2P" in done.stderr


def test_the_boot_default_stays_on_the_last_good_kernel(system: Machine) -> None:
    old = system.base.old
    file = system.path("/etc/gpuguard/gpuguard.yaml")
    file.write_text(f"{file.read_text()}reboot:\n  keep_last_good: always\n")
    trigger(system)
    wait_until_idle(system)
    assert system.boot_loader_starts() == old
    status = system.status()
    assert status["next_kernel"]["release"] == old
    assert status["reboot"]["safe"] is True
    assert system.show("gpuguard-hold-reboot.service", "ActiveState") == "inactive"
    assert system.reboot() == old


def _add_breaking_patch(system: Machine, folder: Path) -> None:
    """A patch with which the source does not compile for the newer kernel."""
    source = copy_standin(folder / "source")
    edits: dict[str, Callable[[str], str]] = {
        "kernel-open/Kbuild": lambda text: (
            f"{text}\nifeq ($(KERNELRELEASE),{system.base.new})\nccflags-y += -DNV_TOO_NEW\nendif\n"
        ),
        "kernel-open/nvidia-uvm/uvm.c": lambda text: (
            f'{text}\n#ifdef NV_TOO_NEW\n#error "this kernel is too new"\n#endif\n'
        ),
    }
    patch = ""
    for name, edit in edits.items():
        before = (source / name).read_text()
        lines = (before.splitlines(keepends=True), edit(before).splitlines(keepends=True))
        patch += "".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}"))
    place = "/etc/gpuguard/patches/second.patch"
    system.path(place).write_text(patch)
    config = system.path("/etc/gpuguard/gpuguard.yaml")
    config.write_text(config.read_text().replace("p2p.patch]", f"p2p.patch, {place}]"))
    assert CLONE in config.read_text()
