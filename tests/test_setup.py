"""tools/setup-debian.sh: installs what is missing, says so, and never fails obscurely."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools/setup-debian.sh"
TOOLS = ("bash", "env", "cat", "basename", "readlink")

# One line of calls.log per call; "installed" and "candidates" are lists of packages.
PROGRAMS = {
    "dpkg-query": 'grep -qx "${@: -1}" installed && echo "ii "',
    "apt-cache": 'grep -qx "${@: -1}" candidates',
    "id": "cat uid",
    "apt-get": """
        echo "apt-get $*" >> calls.log
        case " $* " in
            *" update "*) [ ! -e offered ] || cat offered >> candidates ;;
            *" install "*) [ ! -e broken ] || { rm broken; echo "E: 404" >&2; exit 100; } ;;
        esac
    """,
}


@dataclass(frozen=True)
class Machine:
    """A folder of programs and what they answer."""

    folder: Path

    def write(self, name: str, *lines: str) -> None:
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def run(
        self, *arguments: str, python: str = sys.executable
    ) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.folder / "bin"), "PYTHON": python}
        return subprocess.run(
            ["/bin/bash", SCRIPT, *arguments],
            cwd=self.folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def calls(self) -> list[str]:
        """What was asked of apt-get, without the options that every call has."""
        log = self.folder / "calls.log"
        text = log.read_text() if log.exists() else ""
        return text.replace("-q -o DPkg::Lock::Timeout=300 ", "").splitlines()


@pytest.fixture
def machine(tmp_path: Path, program: Callable[[str, str], None]) -> Machine:
    """A machine on which nothing is installed and apt offers everything."""
    made = Machine(tmp_path)
    for name, body in PROGRAMS.items():
        program(name, body)
    made.write("installed")
    made.write("uid", "0")
    made.write("candidates", *packages(made, "test"))
    return made


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], None]:
    """Put a program into the only folder of PATH."""
    (tmp_path / "bin").mkdir()
    for tool in (*TOOLS, "grep", "rm"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or "/nonexistent")

    def put(name: str, body: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    return put


def packages(machine: Machine, what: str) -> list[str]:
    """What the script wants for a purpose, by its own word."""
    shown = machine.run("--dry-run", what).stderr
    return shown.removeprefix("setup: missing: ").split()


def test_nothing_missing_is_silent(machine: Machine) -> None:
    machine.write("installed", *packages(machine, "test"))
    done = machine.run("test")
    assert (done.returncode, done.stdout, done.stderr, machine.calls()) == (0, "", "", [])


def test_only_what_is_missing_is_installed_and_named(machine: Machine) -> None:
    machine.write("installed", *(set(packages(machine, "demo")) - {"dkms", "zstd"}))
    done = machine.run("demo")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "setup: missing: dkms zstd",
        "setup: installing with apt-get: dkms zstd",
    ]
    assert machine.calls() == ["apt-get install -y --no-install-recommends dkms zstd"]


def test_the_demo_needs_less_than_the_tests(machine: Machine) -> None:
    assert set(packages(machine, "demo")) < set(packages(machine, "test"))


def test_empty_package_lists_are_fetched_first(machine: Machine) -> None:
    machine.write("offered", *packages(machine, "demo"))
    machine.write("candidates")
    assert machine.run("demo").returncode == 0
    assert [call.split()[1] for call in machine.calls()] == ["update", "install"]


def test_stale_package_lists_are_fetched_again(machine: Machine) -> None:
    machine.write("broken")
    assert machine.run("demo").returncode == 0
    assert [call.split()[1] for call in machine.calls()] == ["install", "update", "install"]


def test_a_package_that_apt_does_not_know(machine: Machine) -> None:
    machine.write("candidates")
    done = machine.run("demo")
    assert done.returncode == 69
    last = done.stderr.splitlines()[-1]
    assert last.startswith("setup: apt knows no candidate for some of: dkms kmod")
    assert last.endswith("check /etc/apt/sources.list and the network, then run apt-get update")


def test_an_ordinary_user_goes_through_sudo(
    machine: Machine, program: Callable[[str, str], None]
) -> None:
    machine.write("uid", "1000")
    program("sudo", 'echo "sudo" >> calls.log; exec "$@"')
    assert machine.run("demo").returncode == 0
    assert machine.calls()[0] == "sudo"


def test_without_sudo_the_command_for_root_is_shown(machine: Machine) -> None:
    machine.write("uid", "1000")
    machine.write("installed", *(set(packages(machine, "demo")) - {"dkms"}))
    done = machine.run("demo")
    assert done.returncode == 77
    assert "needs root, and there is no sudo. Run as root: apt-get install dkms" in done.stderr


def test_a_machine_without_apt(machine: Machine) -> None:
    (machine.folder / "bin/apt-get").unlink()
    done = machine.run("demo")
    assert done.returncode == 69
    assert done.stderr.startswith("setup: no apt-get here; install these by other means: dkms kmod")


@pytest.mark.parametrize("arguments", [(), ("all",), ("--dry-run",)])
def test_a_wrong_call(machine: Machine, arguments: tuple[str, ...]) -> None:
    assert machine.run(*arguments).returncode == 2


def test_an_interpreter_without_ensurepip_needs_its_package(
    machine: Machine, program: Callable[[str, str], None]
) -> None:
    program("python3.11", "exit 1")
    shown = machine.run("--dry-run", "demo", python="python3.11")
    assert shown.stderr.split()[-1] == "python3.11-venv"
