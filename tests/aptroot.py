"""A small root with this machine's apt, dpkg and dash: for hooks, on their real paths.

Programs and the libraries that they need are copied once, packages are made with dpkg-deb;
apt and dpkg then work in a chroot, as they do on a host. Needs root.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

_PROGRAMS = (
    "apt-config", "apt-get", "cat", "chmod", "cp", "diff", "dpkg", "dpkg-deb", "dpkg-query",
    "dpkg-split", "grep", "id", "ldconfig", "ln", "ls", "mkdir", "mv", "rm", "run-parts", "sed",
    "sh", "sleep", "start-stop-daemon", "stat", "tar", "timeout", "touch", "true", "uname",
)  # fmt: skip
_METHODS = ("copy", "file", "store")
_FOLDERS = (
    "boot", "dev", "etc/apt/apt.conf.d", "etc/apt/preferences.d", "etc/apt/sources.list.d",
    "etc/depmod.d", "etc/modprobe.d",
    "etc/kernel/header_postinst.d", "etc/kernel/postinst.d", "etc/kernel/postrm.d", "opt", "proc",
    "run", "tmp", "usr/lib/modules", "usr/local/lib", "usr/src", "var/cache/apt/archives/partial",
    "var/lib/apt/lists/partial", "var/lib/dpkg/info", "var/lib/dpkg/updates", "var/log/apt",
)  # fmt: skip
_LIBRARY = re.compile(r"(/\S+) \(0x")
PROGRAM = "opt/gpuguard/bin/gpuguard"


class AptRoot:
    """The root, and apt in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def apt(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """``apt-get``; its output, hooks included, is in ``stdout``."""
        return self.run("apt-get", "-qq", "-y", "-o", "DPkg::Use-Pty=0", *words, **environment)

    def install(self, *packages: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Install package files, which lie below ``tmp``."""
        return self.apt("install", *(f"/tmp/{package.name}" for package in packages), **environment)

    def run(self, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the root, stdout and stderr in one."""
        return subprocess.run(
            ["chroot", str(self.root), *argv],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    def package(
        self,
        name: str,
        version: str = "1",
        files: Mapping[str, str] = {},
        fields: Mapping[str, str] = {},
        scripts: Mapping[str, str] = {},
    ) -> Path:
        """Make a package file in ``tmp``."""
        folder = self.root / f"tmp/{name}-{version}"
        control = {
            "Package": name, "Version": version, "Architecture": "all",
            "Maintainer": "Test <test@example.org>", "Description": "test", **fields,
        }  # fmt: skip
        text = "".join(f"{key}: {value}\n" for key, value in control.items())
        for path, content in {"DEBIAN/control": text, **files}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
        for script, body in scripts.items():
            (folder / "DEBIAN" / script).write_text(f"#!/bin/sh\n{body}\n")
            (folder / "DEBIAN" / script).chmod(0o755)
        target = self.root / f"tmp/{name}_{version}_{control['Architecture']}.deb"
        words = ("dpkg-deb", "--build", "--root-owner-group", "-Znone")
        subprocess.run([*words, folder, target], check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(folder)
        return target

    def program(self, body: str) -> Path:
        """Put a shell script in the place of gpuguard."""
        return self.script(PROGRAM, body)

    def script(self, path: str, body: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_text(f"#!/bin/sh\n{body}\n")
        target.chmod(0o755)
        return target

    def path(self, inside: str) -> Path:
        return self.root / inside.lstrip("/")


def make_apt_root(root: Path) -> AptRoot:
    """A root of its own, some 15 MB."""
    if os.geteuid() != 0:
        pytest.skip("apt works in a chroot here, which needs root")
    for name in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64"):
        (root / name).mkdir(parents=True)
        (root / Path(name).name).symlink_to(name)
    for folder in _FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    files = [shutil.which(name) or pytest.skip(f"{name} is not here") for name in _PROGRAMS]
    files += [f"/usr/lib/apt/methods/{name}" for name in _METHODS]
    for file in sorted({*files, *_libraries(files)}):
        target = root / str(Path(file).parent.resolve()).lstrip("/") / Path(file).name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    shutil.copytree("/usr/share/dpkg", root / "usr/share/dpkg")
    os.mknod(root / "dev/null", 0o020666, os.makedev(1, 3))
    (root / "dev/null").chmod(0o666)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\n_apt:x:42:65534::/:/bin/false\n"
    )
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "etc/apt/sources.list").touch()
    (root / "var/lib/dpkg/status").touch()
    return AptRoot(root)


def _libraries(programs: list[str]) -> set[str]:
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False)
    return set(_LIBRARY.findall(done.stdout))
