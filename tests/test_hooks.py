"""Hooks in the hands of the real apt, dpkg and run-parts: they work, and they never hurt."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuguard.core.apt_check import REFUSED
from tests.aptroot import PROGRAM, AptRoot, make_apt_root

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
QUEUE = "var/lib/gpuguard/rebuild-wanted"
LAST_RUN = "var/lib/gpuguard/last-run.json"
HOOK = "usr/local/lib/gpuguard/apt-hook"
CHECK = "usr/local/lib/gpuguard/apt-check"
LISTED = "tmp/listed"
KERNEL = "linux-image-6.1.0-50-amd64"
FILES = {
    "boot/vmlinuz-6.1.0-50-amd64": "kernel",
    "usr/lib/modules/6.1.0-50-amd64/kernel/x.ko": "module",
}


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the hooks that the real ``gpuguard setup`` installed."""
    root = make_apt_root(tmp_path_factory.mktemp("apt") / "root")
    root.program("exit 0")
    command = [sys.executable, "-m", "gpuguard", "--root", str(root.root), "setup"]
    subprocess.run(
        [*command, "--program", f"/{PROGRAM}"], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE
    )
    root.path("etc/gpuguard").mkdir()
    root.path("etc/gpuguard/gpuguard.yaml").touch()
    return root.root


@pytest.fixture
def apt(pattern: Path, tmp_path: Path) -> AptRoot:
    """A copy of it, in which an automatic run has just seen everything."""
    root = tmp_path / "root"
    subprocess.run(["cp", "-a", pattern, root], check=True)
    copy = AptRoot(root)
    seen(copy)
    return copy


def seen(apt: AptRoot) -> None:
    """As an automatic run leaves it: the file is gone, and nothing is newer than its look."""
    apt.path(QUEUE).unlink(missing_ok=True)
    file = apt.path(LAST_RUN)
    file.touch()
    ahead = time.time() + 0.05  # clocks of file systems tick every 4 ms
    os.utime(file, (ahead, ahead))
    while time.time() <= ahead + 0.01:
        pass


def lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("gpuguard:")]


# --- after dpkg ---------------------------------------------------------------------------


def test_a_new_kernel_is_told_once_and_asked_for(apt: AptRoot) -> None:
    done = apt.install(apt.package(KERNEL, files=FILES))
    assert done.returncode == 0, done.stdout
    assert len(lines(done.stdout)) == 1
    assert "gpuguard rebuild" in done.stdout
    assert apt.path(QUEUE).exists()


def test_on_a_booted_system_the_line_says_why_not_to_reboot(apt: AptRoot) -> None:
    apt.path("run/systemd/system").mkdir(parents=True)
    done = apt.install(apt.package(KERNEL, files=FILES))
    (line,) = lines(done.stdout)
    assert "gpuguard looks at them as soon as apt is done: do not reboot yet" in line
    assert "rebuild" not in line, "whether there is one is for the configuration to say"


def test_while_gpuguard_runs_apt_itself_the_hook_only_asks(apt: AptRoot) -> None:
    apt.path("run/systemd/system").mkdir(parents=True)
    done = apt.install(apt.package(KERNEL, files=FILES), GPUGUARD_APT_CHECK="never")
    assert lines(done.stdout) == []
    assert apt.path(QUEUE).exists()


@pytest.mark.parametrize("umask", ["000", "077"])
def test_what_hooks_make_has_the_same_mode_whatever_apt_runs_with(apt: AptRoot, umask: str) -> None:
    shutil.rmtree(apt.path("var/lib/gpuguard"))
    shutil.rmtree(apt.path("run/gpuguard"), ignore_errors=True)
    answer(apt, "exit 1")
    package = apt.package(KERNEL, files=FILES)
    command = f"umask {umask}; apt-get -qq -y -o DPkg::Use-Pty=0 install /tmp/{package.name}"
    assert apt.run("sh", "-c", command).returncode == 0
    modes = {
        path: oct(apt.path(path).stat().st_mode & 0o777)
        for path in ("run/gpuguard", "run/gpuguard/apt-check.log", "var/lib/gpuguard", QUEUE)
    }
    assert set(modes.values()) == {"0o755", "0o644"}, modes
    apt.path(QUEUE).unlink()
    shutil.rmtree(apt.path("var/lib/gpuguard"))
    hook = "/etc/kernel/postinst.d/dkms-gpuguard"
    assert apt.run("sh", "-c", f"umask {umask}; {hook}").returncode == 0
    assert apt.path("var/lib/gpuguard").stat().st_mode & 0o777 == 0o755
    assert apt.path(QUEUE).stat().st_mode & 0o777 == 0o644


def test_other_packages_are_no_news(apt: AptRoot) -> None:
    done = apt.install(apt.package("editor", files={"usr/bin/editor": "x"}))
    assert done.returncode == 0, done.stdout
    assert lines(done.stdout) == []
    assert not apt.path(QUEUE).exists()


@pytest.mark.parametrize(
    "path",
    [
        "usr/lib/modules/6.1.0-47-amd64/updates/dkms/nvidia.ko",
        "usr/src/nvidia-580.95.05/dkms.conf",
        "usr/src/linux-headers-6.1.0-50-amd64/Module.symvers",
        "usr/lib/firmware/nvidia/580.95.05/gsp_ga10x.bin",
        "usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.261.03",
        "usr/share/doc/libnvidia-compute-580/copyright",
        "etc/modprobe.d/nvidia.conf",
    ],
)
def test_what_changes_what_the_next_boot_loads_is_news(apt: AptRoot, path: str) -> None:
    apt.path(path).parent.parent.mkdir(parents=True, exist_ok=True)
    seen(apt)
    done = apt.install(apt.package("anything", files={path: "x"}))
    assert len(lines(done.stdout)) == 1, done.stdout
    assert apt.path(QUEUE).exists()


def test_one_line_for_a_transaction_however_often_the_hook_is_called(apt: AptRoot) -> None:
    """apt runs dpkg, and the hook, once or several times."""
    ours = apt.path("etc/apt/apt.conf.d/99gpuguard").read_text()
    (line,) = [line for line in ours.splitlines() if line.startswith("DPkg::Post-Invoke")]
    apt.path("etc/apt/apt.conf.d/99zz-again").write_text(f"{line}\n{line}\n")
    done = apt.install(apt.package(KERNEL, files=FILES))
    assert len(lines(done.stdout)) == 1
    again = apt.install(apt.package("editor"))
    assert len(lines(again.stdout)) == 1, "still queued: the next transaction is told, too"


def test_a_transaction_that_failed_is_looked_at_too(apt: AptRoot) -> None:
    done = apt.install(apt.package(KERNEL, files=FILES, scripts={"postinst": "exit 3"}))
    assert done.returncode == 100
    assert "Problem executing scripts" not in done.stdout
    assert apt.path(QUEUE).exists()


def test_without_a_configuration_nobody_is_told(apt: AptRoot) -> None:
    apt.path("etc/gpuguard/gpuguard.yaml").unlink()
    done = apt.install(apt.package(KERNEL, files=FILES))
    assert lines(done.stdout) == []
    assert not apt.path(QUEUE).exists()


@pytest.mark.parametrize(
    "state",
    [
        "hook gone", "not executable", "exits 1", "hangs", "not a program", "program gone",
        "state gone", "read-only", "full disk",
    ],
)  # fmt: skip
def test_apt_works_in_every_state_of_gpuguard(apt: AptRoot, state: str) -> None:
    """CASES C40, C41."""
    package = apt.package(KERNEL, files=FILES)
    with broken(apt, state):
        done = apt.install(package)  # what hangs would outlast the time that this is given
    assert done.returncode == 0, done.stdout
    assert "E:" not in done.stdout
    if state in ("read-only", "full disk"):
        (line,) = lines(done.stdout)
        assert "no rebuild can be queued" in line
        assert "gpuguard rebuild" in line
    if state in ("hook gone", "not executable", "exits 1", "hangs", "not a program"):
        assert lines(done.stdout) == []
    if state == "state gone":
        assert apt.path(QUEUE).exists()
    if state == "program gone":
        assert not apt.path(QUEUE).exists()


@contextmanager
def broken(apt: AptRoot, state: str) -> Iterator[None]:
    folder = apt.path("var/lib/gpuguard")
    options = {"read-only": "ro,size=64k", "full disk": "size=64k,nr_inodes=1"}.get(state)
    if options is None:
        damage(apt, state)
        yield
        return
    mount("-t", "tmpfs", "-o", options, "tmpfs", folder)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def damage(apt: AptRoot, state: str) -> None:
    hook = apt.path(HOOK)
    match state:
        case "hook gone":
            shutil.rmtree(hook.parent)
        case "not executable":
            hook.chmod(0o644)
        case "exits 1":
            apt.script(HOOK, "exit 1")
        case "hangs":
            apt.script(HOOK, "trap '' TERM; sleep 600")
        case "not a program":
            hook.write_bytes(b"\x7fELF")
        case "program gone":
            apt.path(PROGRAM).unlink()
        case "state gone":
            shutil.rmtree(apt.path("var/lib/gpuguard"))


def mount(*words: object) -> None:
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


def test_the_hook_starts_no_python_and_no_program_without_news(apt: AptRoot) -> None:
    for name in ("mkdir", "sed", "grep", "cat"):
        apt.script(f"usr/bin/{name}", f"echo {name} >>/tmp/started")
    apt.program("echo program >>/tmp/started")
    assert apt.run(f"/{HOOK}", "1").returncode == 0
    assert not apt.path("tmp/started").exists()


# --- kernel packages ----------------------------------------------------------------------


def test_kernel_hooks_run_between_dkms_and_the_makers_of_initramfs(apt: AptRoot) -> None:
    for folder in ("postinst.d", "header_postinst.d", "postrm.d"):
        for name in ("apt-auto-removal", "dkms", "dracut", "initramfs-tools", "zz-update-grub"):
            apt.script(f"etc/kernel/{folder}/{name}", "exit 0")
        done = apt.run("run-parts", "--list", f"/etc/kernel/{folder}")
        names = [Path(line).name for line in done.stdout.splitlines()]
        at = names.index("dkms-gpuguard")
        assert names[at - 1 : at + 2] == ["dkms", "dkms-gpuguard", "dracut"], names


@pytest.mark.parametrize("state", ["fine", "program gone", "state gone", "read-only"])
def test_kernel_hooks_ask_and_never_fail(apt: AptRoot, state: str) -> None:
    script = "run-parts --report --exit-on-error --arg=6.1.0-50-amd64 /etc/kernel/postinst.d"
    package = apt.package(KERNEL, scripts={"postinst": script})
    with broken(apt, state):
        done = apt.run("dpkg", "-i", f"/tmp/{package.name}")
        assert done.returncode == 0, done.stdout
        assert "dkms-gpuguard" not in done.stdout, "nothing to be reported"
        assert apt.path(QUEUE).exists() == (state in ("fine", "state gone"))


def test_what_a_kernel_hook_asked_for_is_told_by_apt(apt: AptRoot) -> None:
    script = "run-parts --exit-on-error /etc/kernel/header_postinst.d"
    done = apt.install(apt.package("linux-headers-6.1.0-50-amd64", scripts={"postinst": script}))
    assert len(lines(done.stdout)) == 1, done.stdout


# --- before dpkg --------------------------------------------------------------------------


def answer(apt: AptRoot, body: str) -> None:
    """What gpuguard would say when it is asked about packages."""
    apt.program(f'[ "$1" = apt-check ] || exit 0\ncat >/{LISTED}\n{body}')


def test_gpuguard_gets_the_kernels_and_drivers_of_the_list(apt: AptRoot) -> None:
    answer(apt, "exit 0")
    packages = [
        apt.package(KERNEL, "6.1.176-1"),
        apt.package("libnvidia-ml1", "535.261.03-1~deb12u1"),
        apt.package("editor"),
    ]
    done = apt.install(*packages)
    assert done.returncode == 0, done.stdout
    listed = apt.path(LISTED).read_text().splitlines()
    names = {line.split()[0] for line in listed}
    assert names == {KERNEL, "libnvidia-ml1"}
    # what protocol 3 looks like, see tests/golden/apt-2.6-pre-install-pkgs-3.txt
    file = f"/tmp/{packages[0].name}"
    assert f"{KERNEL} - - none < 6.1.176-1 all none {file}" in listed
    assert f"{KERNEL} - - none < 6.1.176-1 all none **CONFIGURE**" in listed


def test_other_packages_are_not_asked_about(apt: AptRoot) -> None:
    answer(apt, "exit 0")
    assert apt.install(apt.package("editor")).returncode == 0
    assert not apt.path(LISTED).exists()


def test_a_refusal_stops_apt_before_anything_is_changed(apt: AptRoot) -> None:
    answer(apt, f"echo 'gpuguard: no patched source'; exit {REFUSED}")
    package = apt.package(KERNEL, files=FILES)
    before = apt.path("var/lib/dpkg/status").read_bytes()
    done = apt.install(package)
    assert done.returncode == 100
    assert "gpuguard: no patched source" in done.stdout
    assert apt.path("var/lib/dpkg/status").read_bytes() == before
    assert not apt.path("boot/vmlinuz-6.1.0-50-amd64").exists()
    passed = apt.install(package, GPUGUARD_APT_CHECK="never")
    assert passed.returncode == 0, passed.stdout


@pytest.mark.parametrize(
    "fault",
    [
        "exit 1", "exit 2", "exit 78", "kill -9 $$", "exec /nonexistent",
        "echo 'ModuleNotFoundError: gpuguard' >&2; exit 1", "exit 127",
    ],
)  # fmt: skip
def test_any_other_answer_lets_apt_go_on(apt: AptRoot, fault: str) -> None:
    answer(apt, fault)
    done = apt.install(apt.package(KERNEL, files=FILES))
    assert done.returncode == 0, done.stdout
    assert "could not tell whether there is a patched source" in done.stdout
    assert "ModuleNotFoundError" not in done.stdout, "that is for the log"
    assert apt.path("boot/vmlinuz-6.1.0-50-amd64").exists()


def test_an_answer_that_never_comes_lets_apt_go_on(apt: AptRoot) -> None:
    script = apt.path(CHECK)
    text = script.read_text()
    assert "timeout -k 1 8 " in text, "README says what it can cost"
    script.write_text(text.replace("timeout -k 1 8 ", "timeout -k 1 1 "))
    answer(apt, "trap '' TERM; sleep 600")
    done = apt.install(apt.package(KERNEL))
    assert done.returncode == 0, done.stdout
    assert "apt goes on" in done.stdout


@pytest.mark.parametrize("state", ["gone", "not executable", "does not read", "program gone"])
def test_a_long_list_that_nobody_reads_is_no_fault(apt: AptRoot, state: str) -> None:
    match state:
        case "gone":
            apt.path(CHECK).unlink()
        case "not executable":
            apt.path(CHECK).chmod(0o644)
        case "does not read":
            apt.script(CHECK, "exit 0")
        case "program gone":
            apt.path(PROGRAM).unlink()
    for number in range(400):  # the configuration alone is some 30 kB, a pipe holds 64
        (apt.path("etc/apt/apt.conf.d") / f"90filler{number:03}").write_text(
            f'GPUGuard-Test::Filler{number} "{"x" * 400}";\n'
        )
    done = apt.install(apt.package(KERNEL))
    assert done.returncode == 0, done.stdout
