"""What the tests of ansible/ need: a bare booted Debian, its packages, and ansible-playbook.

The bare root has a kernel and a compiler, and neither driver nor Python environment. Whatever
the roles install comes from an apt repository inside it, filled from the machine's own sources;
Python packages come from a folder of wheels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import booted_roots, standin_packages
from tests.booted import Machine, machine
from tests.booted_roots import ARCHIVE, CLONE, RELEASES, Base, overlay
from tests.realroot import REPO, Lab, cache_dir, chroot, mounted

ANSIBLE = REPO / "ansible"
WHEELS = "/srv/wheels"
#: What the roles install from the distribution, besides what the bare root has.
_PACKAGES = ("python3-apt", "prometheus", "prometheus-alertmanager", "prometheus-node-exporter",
             "haproxy", "libnuma1", "g++")  # fmt: skip
_PERSISTENCED = """\
[Unit]
Description=Stand-in for NVIDIA's persistence daemon

[Service]
ExecStart=/bin/sleep infinity

[Install]
WantedBy=multi-user.target
"""


def missing() -> str | None:
    """Why no playbook can be run here, with what helps."""
    if importlib.util.find_spec("ansible") is None:
        return "ansible-core is not installed: pip install -e '.[dev,ansible]'"
    return None


def tool(name: str) -> str:
    """A program of Ansible's, beside this Python."""
    if reason := missing():
        pytest.skip(reason)
    return str(Path(sys.executable).with_name(name))


@dataclass(frozen=True)
class Run:
    """A finished run of ansible-playbook."""

    returncode: int
    output: str

    def count(self, host: str, what: str) -> int:
        """A number of the recap: ``changed``, ``failed``, ``unreachable``."""
        line = re.search(rf"^{re.escape(host)} +: (.*)$", self.output, re.MULTILINE)
        assert line is not None, self.output
        found = re.search(rf"\b{what}=(\d+)", line[1])
        assert found is not None
        return int(found[1])

    def reached(self, host: str) -> bool:
        """Whether any task was tried there."""
        return re.search(rf"^{re.escape(host)} +: ", self.output, re.MULTILINE) is not None


class Fleet:
    """An inventory of booted machines, and playbooks run on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hosts: dict[str, dict[str, Any]] = {}

    def add(self, name: str, system: Machine, **variables: Any) -> None:
        """A machine under a name; call ``booted`` after every boot of it."""
        pid_file = self.folder / f"{name}.pid"
        self._hosts[name] = {
            "ansible_connection": "booted",
            "ansible_booted_pid_file": str(pid_file),
            "ansible_become": False,
            **variables,
        }
        self.booted(name, system)

    def add_unreachable(self, name: str) -> None:
        """A host that nobody can log in to."""
        self._hosts[name] = {"ansible_connection": "booted", "ansible_booted_pid_file": "/dev/null"}

    def remove(self, name: str) -> None:
        """Take a host out of the inventory."""
        del self._hosts[name]

    def booted(self, name: str, system: Machine) -> None:
        """Remember the pid under which a machine runs now."""
        pid_file = self.folder / f"{name}.pid"
        pid_file.with_suffix(".new").write_text(str(system._leader()))
        pid_file.with_suffix(".new").rename(pid_file)

    def play(self, playbook: str, *words: str, variables: Mapping[str, Any] = {}) -> Run:
        """Run a playbook of ansible/; output and errors are kept."""
        inventory = self.folder / "inventory.json"
        inventory.write_text(json.dumps({"gpu_hosts": {"hosts": self._hosts}}))
        extra = self.folder / "variables.json"
        extra.write_text(json.dumps(variables))
        done = subprocess.run(
            [tool("ansible-playbook"), "-i", inventory, "-e", f"@{extra}", *words, playbook],
            cwd=ANSIBLE, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            env={
                **os.environ,
                "ANSIBLE_CONNECTION_PLUGINS": str(REPO / "tests/ansible_connection"),
                "ANSIBLE_LOCAL_TEMP": str(self.folder / "tmp"),
                "ANSIBLE_NOCOLOR": "1",
            },
        )  # fmt: skip
        return Run(done.returncode, done.stdout)


class Wall(threading.Thread):
    """Starts a machine again whenever it goes down for a reboot."""

    def __init__(self, name: str, system: Machine, fleet: Fleet) -> None:
        super().__init__(daemon=True)
        self.host = name
        self.system = system
        self.fleet = fleet
        self.boots = 0
        self.before_boot: Callable[[], object] = lambda: None
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.2):
            if not self.system.is_running:
                self.before_boot()
                self.system.come_back()
                self.fleet.booted(self.host, self.system)
                self.boots += 1

    def stop(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join()


@contextmanager
def held_back(system: Machine) -> Iterator[None]:
    """Somebody inside holds a reboot back."""
    words = ("--what=shutdown", "--mode=block", "--who=test", "--why=a test", "sleep", "infinity")
    with system.start("systemd-inhibit", *words) as holder:
        try:
            system.wait_for(
                lambda: "a test" in system.run("systemd-inhibit", "--list").stdout, 30, "held"
            )
            yield
        finally:
            os.killpg(holder.pid, signal.SIGKILL)


@contextmanager
def bare_machine(folder: Path) -> Iterator[Machine]:
    """A machine with a kernel and apt, and nothing of ours; not started yet."""
    base = booted_roots.get_base(RELEASES[0])
    with overlay((base.layers[-1],), folder) as root:
        _fill_archive(root, base)
        shutil.copytree(_driver_layer(base) / CLONE.lstrip("/"), root / CLONE.lstrip("/"))
        shutil.copytree(_wheels(base), root / WHEELS.lstrip("/"))
        add_cuda_wheels(root / WHEELS.lstrip("/"))
        with mounted(root):
            chroot(root, "apt-get", "-q", "update")
            # what pulls in the next kernel is on every installed Debian
            chroot(root, "apt-get", "-qy", "install", "linux-image-cloud-amd64")
        with machine(root, base, folder) as system:
            yield system


def _driver_layer(base: Base) -> Path:
    return base.layers[0]


def _fill_archive(root: Path, base: Base) -> None:
    archive = root / ARCHIVE.lstrip("/")
    shutil.copytree(_driver_layer(base) / ARCHIVE.lstrip("/"), archive)
    versions = sorted(f.name.split("_")[1] for f in archive.glob("linux-image-cloud-amd64_*"))
    packages = download(base, base.layers[-1], *_PACKAGES)
    for file in packages:
        shutil.copy(file, archive)
    names = booted_roots.published_at_first(versions[0])
    names += [f.name for f in packages] + [_make_persistenced(archive).name]
    (root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{ARCHIVE} ./\n")
    shutil.rmtree(root / "etc/apt/sources.list.d", ignore_errors=True)
    booted_roots.publish(root, *names)


def download(base: Base, layer: Path, *packages: str) -> list[Path]:
    """Packages of the distribution, and all that they need and a layer does not have."""
    lab = Lab(cache_dir() / f"apt-{base.debian.suite}", release=base.debian.suite)
    with booted_roots._locked():  # another test's apt may be at work in the same folder
        return lab.with_needs(layer, *packages)


def _make_persistenced(archive: Path) -> Path:
    unit = archive / "tree/usr/lib/systemd/system/nvidia-persistenced.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(_PERSISTENCED)
    tree = archive / "tree"
    deb = standin_packages._build(archive, tree, "nvidia-persistenced", "1-1", "", {})
    shutil.rmtree(tree)
    return deb


def _wheels(base: Base) -> Path:
    """What gpuguard needs, as the role pins it, for the root's Python; downloaded once."""
    constraints = ANSIBLE / "roles/gpuguard/files/constraints.txt"
    folder = cache_dir() / "booted" / f"wheels-{base.debian.python}"
    mark = folder / "constraints.txt"
    if not mark.exists() or mark.read_text() != constraints.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        platforms = [f"--platform=manylinux{v}_x86_64" for v in ("2014", "_2_17", "_2_28")]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-qq", "--only-binary=:all:",
             f"--python-version={base.debian.python}", "--implementation=cp", *platforms,
             "-c", constraints, "-d", folder, *booted_roots._requirements()],
            check=True,
        )  # fmt: skip
        shutil.copy(constraints, mark)
    return folder


def add_cuda_wheels(folder: Path) -> None:
    """What the extra deep needs, as the role pins it, with nothing in it: the real are large."""
    lines = (ANSIBLE / "roles/gpuguard/files/constraints.txt").read_text().splitlines()
    wanted = project()["optional-dependencies"]["deep"]
    for line in lines:
        name, _, version = line.partition("==")
        if any(need.startswith(name) for need in wanted):
            _empty_wheel(folder, name.replace("-", "_"), version)


def _empty_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def project() -> dict[str, Any]:
    """``[project]`` of pyproject.toml."""
    return dict(tomllib.loads((REPO / "pyproject.toml").read_text())["project"])


def install_stub_engine(root: Path, venv: str = "/opt/vllm", model: str = "/srv/model") -> None:
    """The stub in place of vLLM, and a folder that stands for weights."""
    code = root / venv.lstrip("/") / "stub"
    shutil.copytree(REPO / "tests/golden", code / "golden")
    shutil.copy(REPO / "tests/stub_vllm.py", code)
    program = root / venv.lstrip("/") / "bin/vllm"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/usr/bin/python3\nimport runpy\n"
        f"runpy.run_path('{venv}/stub/stub_vllm.py', run_name='__main__')\n"
    )
    program.chmod(0o755)
    weights = root / model.lstrip("/")
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (weights / "model.safetensors").write_bytes(b"weights")
