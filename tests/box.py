"""A host tree of toys with everything that a rebuild needs, and the real program run on it.

The source is the stand-in, but its ``kernel-open/Makefile`` "compiles" by copying toy modules
within milliseconds; depmod, modprobe, patch, make and the initramfs tool are the real ones.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil  # noqa: F401 - so that a child need not import it
import pytest
import sh  # noqa: F401
import yaml

import gpuguard.__main__ as program
import gpuguard.cli.app
import gpuguard.cli.backups
import gpuguard.cli.rebuild
import gpuguard.cli.status  # noqa: F401 - verbs are imported when asked for: here, once for all
from gpuguard.demo.kernels import cpio_archive
from gpuguard.demo.source import P2P_PATCH, copy_standin
from gpuguard.host.elf import read_module
from tests import toys
from tests.building import folder_for_others, gcc_text, git
from tests.trees import make_tree

REPOSITORY = Path(__file__).parents[1]
K1 = "6.8.0-90-generic"  # runs
K2 = "6.8.0-100-generic"  # new, boots next
SOURCE = "srv/nvidia/source"
PATCH = "srv/nvidia/p2p.patch"
BUILT = "srv/built"  # <release>/<module>.ko: what a "compile" for that release makes
LIBRARY = "usr/lib/x86_64-linux-gnu/libnvidia-ml.so"
CONFIG: Mapping[str, Any] = {
    "source": {"path": f"/{SOURCE}", "patches": [f"/{PATCH}"]},
    "build": {"user": "nobody"},
    "lock_timeout_seconds": 0,
}
#: KERNEL_UNAME defaults to the running kernel, as in NVIDIA's own (CASES C22).
MAKEFILE = """\
KERNEL_UNAME ?= $(shell uname -r)
modules:
\t@echo "  LD [M]  nvidia.ko for $(KERNEL_UNAME)"
\t@cp BUILT/$(KERNEL_UNAME)/*.ko .
"""
NO_P2P = ("proc/driver/nvidia", "sys/module")


@dataclass(frozen=True)
class Answer:
    """What the program said."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """Of a verb that failed as a whole, or of the first step that failed."""
        document = self.document
        if "error" in document:
            return dict(document["error"])
        return next(dict(step["error"]) for step in document["steps"] if "error" in step)


@dataclass(frozen=True)
class Box:
    """A tree, and the program."""

    root: Path

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """The program in a process group of its own, not waited for."""
        return subprocess.Popen(
            [sys.executable, "-m", "gpuguard", "--root", self.root, *words],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, *words: str, user: str | None = None, **environment: str) -> Answer:
        """The program's own ``main`` in a child of this process: the imports are made once."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                _become_program(self.root, words, out.fileno(), err.fileno(), user, environment)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            out.seek(0)
            err.seek(0)
            answer = Answer(status, out.read(), err.read())
        assert "Traceback" not in answer.err, answer.err
        return answer

    def json(self, *words: str) -> Answer:
        return self.run("--json", *words)

    def status(self) -> dict[str, Any]:
        answer = self.json("status")
        document = dict(answer.document)
        verdict = {"ok": 0, "warning": 1, "critical": 1, "unknown": 3}[document["verdict"]]
        assert answer.status == verdict
        return document

    def findings(self, subject: str | None = None) -> dict[str, dict[str, Any]]:
        """Code -> finding, of one subject or of all."""
        found = self.status()["findings"]
        return {f["code"]: f for f in found if subject in (None, f["subject"])}

    def kernel(self, release: str) -> dict[str, Any]:
        return next(dict(k) for k in self.status()["kernels"] if k["release"] == release)

    def winner(self, release: str, name: str = "nvidia") -> str:
        """Path of what modprobe would load, as status tells it."""
        modules = self.kernel(release)["modules"]
        return str(next(m["path"] for m in modules if m["name"] == name))

    def rebuild(self, *words: str) -> Answer:
        return self.json("rebuild", *words)

    def rebuilt(self, *words: str) -> dict[str, Any]:
        """Rebuild successfully; the document."""
        answer = self.rebuild(*words)
        assert answer.status == 0, answer.out + answer.err
        return dict(answer.document)

    def configure(self, **more: Any) -> None:
        """The configuration, with keys added or replaced."""
        file = self.root / "etc/gpuguard/gpuguard.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump({**CONFIG, **more}))

    def snapshot(self) -> dict[str, str]:
        """All that a failed verb must leave as it is; its own cache, logs and state are not."""
        return toys.snapshot(
            self.root, without=("var/lib/gpuguard", "var/cache/gpuguard", "var/log/gpuguard")
        )

    def path(self, inside: str) -> Path:
        return self.root / inside.lstrip("/")

    def tree(self, release: str) -> Path:
        return self.root / "lib/modules" / release

    def dkms_copy(self, release: str, name: str = "nvidia") -> Path:
        return self.tree(release) / "updates/dkms" / f"{name}.ko"

    def compile_to(self, target: str, *, seed: str = "patched", **how: Any) -> None:
        """What the next "compile" for a release makes."""
        for name in toys.NAMES:
            given = {"name": name, "release": target, "seed": f"{seed} {name}", **how}
            toys.toy_module(self.root / BUILT / target / f"{name}.ko", **given)

    def leftovers(self) -> list[str]:
        """Staging folders, temporary files and journals that should be gone."""
        staging = self.root / "var/cache/gpuguard/staging"
        found = list(staging.iterdir()) if staging.is_dir() else []
        found += list(self.root.rglob("*.gpuguard-new"))
        found += list(self.root.glob("var/lib/gpuguard/**/.incoming*"))
        journal = self.root / "var/lib/gpuguard/journal.jsonl"
        return [str(path) for path in (*found, *([journal] if journal.exists() else []))]

    def backups(self, release: str | None = None) -> list[dict[str, Any]]:
        which = ("--kernel", release) if release else ()
        return list(self.json("backups", *which).document["backups"])


def _become_program(
    root: Path,
    words: Sequence[str],
    out: int,
    err: int,
    user: str | None,
    environment: Mapping[str, str],
) -> NoReturn:
    status = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        sys.argv = ["gpuguard", "--root", str(root), *words]
        os.environ.update(environment)
        if user is not None:
            _import_everything(root)  # that account may not be able to read it
            account = pwd.getpwnam(user)
            os.setgroups([])
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
        program.main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - a child must not go on as the test run
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _import_everything(root: Path) -> None:
    argv, out = sys.argv, sys.stdout
    sys.argv = ["gpuguard", "--root", str(root), "status"]
    with suppress(SystemExit), Path(os.devnull).open("w") as sys.stdout:
        program.main()
    sys.argv, sys.stdout = argv, out


def furnish(root: Path, *releases: str, stock: bool = True) -> Box:
    """Kernels with headers and stock modules; the first one runs, the last one boots next."""
    box = Box(root)
    for folder in (
        "etc/depmod.d", "etc/modprobe.d", "sys/firmware", "sys/bus/pci",
        "var/lib", "var/cache", "var/log",
    ):  # fmt: skip
        (root / folder).mkdir(parents=True)
    for release in releases:
        toys.toy_kernel(root, release)
        add_headers(root, release)
        if stock:
            toys.stock_modules(root, release)
        else:
            toys.depmod(root, release)
        box.compile_to(release)
    if releases:
        toys.set_running(root, releases[0])
        toys.set_next(root, releases[-1])
    set_userland(root, toys.VERSION)
    source = copy_standin(root / SOURCE)
    makefile = MAKEFILE.replace("BUILT", str(root / BUILT))
    (source / "kernel-open/Makefile").write_text(makefile)
    shutil.copyfile(P2P_PATCH, root / PATCH)
    box.configure()
    return box


def add_headers(root: Path, release: str, **config: str) -> Path:
    """All files that kbuild needs, none of which works."""
    folder = root / "usr/src" / f"linux-headers-{release}"
    options = {"CONFIG_X86_64": "y", "CONFIG_CC_VERSION_TEXT": f'"{gcc_text()}"', **config}
    make_tree(
        folder,
        {
            "Makefile": "# kbuild\n",
            ".config": "".join(f"{key}={value}\n" for key, value in options.items()),
            "Module.symvers": "0x01\tmodule_layout\tvmlinux\tEXPORT_SYMBOL\n",
            "include/config/auto.conf": "",
            "include/generated/autoconf.h": "",
            "include/generated/utsrelease.h": f'#define UTS_RELEASE "{release}"\n',
            "scripts/basic/fixdep": "",
            "scripts/mod/modpost": "",
        },
    )
    link = root / "lib/modules" / release / "build"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(f"/usr/src/linux-headers-{release}")
    return folder


def set_userland(root: Path, version: str) -> None:
    link = root / f"{LIBRARY}.1"
    link.parent.mkdir(parents=True, exist_ok=True)
    for old in link.parent.glob("libnvidia-ml.so.*"):
        old.unlink()
    (root / f"{LIBRARY}.{version}").write_bytes(b"")
    link.symlink_to(f"libnvidia-ml.so.{version}")


def load(root: Path, module: Path) -> None:
    """Pretend that a module file is what the running kernel has loaded."""
    import struct

    build_id = bytes.fromhex(build_id_of(module) or "")
    note = struct.pack("<III4s", 4, len(build_id), 3, b"GNU") + build_id
    make_tree(
        root,
        {
            "sys/module/nvidia/notes/.note.gnu.build-id": note,
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for "
            f"x86_64  {toys.VERSION}  Release Build  (builder@host)\n",
        },
    )


def build_id_of(module: Path) -> str | None:
    with module.open("rb") as file:
        return read_module(file).build_id


def initramfs(root: Path, release: str, *modules: Path, compress: str = "") -> Path:
    """A real image, made with cpio and the compressor of that suffix, and microcode in front."""
    image = root / f"boot/initrd.img-{release}"
    folder = root.parent / f".{root.name}-initramfs"
    inside = folder / "usr/lib/modules" / release / "updates"
    inside.mkdir(parents=True)
    (folder / "init").write_text("#!/bin/sh\n")
    for module in modules:
        shutil.copyfile(module, inside / module.name)
    names = "\n".join(str(p.relative_to(folder)) for p in sorted(folder.rglob("*")))
    made = subprocess.run(
        ["cpio", "--quiet", "-o", "-H", "newc"],
        cwd=folder, input=names.encode(), stdout=subprocess.PIPE, check=True,
    ).stdout  # fmt: skip
    shutil.rmtree(folder)
    tools = {"": ["cat"], ".zst": ["zstd", "-qc"], ".xz": ["xz", "-c", "--check=crc32"]}
    command = {**tools, ".gz": ["gzip", "-c"]}[compress]
    packed = subprocess.run(command, input=made, stdout=subprocess.PIPE, check=True).stdout
    early = cpio_archive({"kernel/x86/microcode/GenuineIntel.bin": b"microcode"})
    image.write_bytes((early if compress else b"") + packed)
    return image


@pytest.fixture
def empty_root() -> Iterator[Path]:
    """A folder that the build user may enter, too."""
    with folder_for_others() as folder:
        yield folder / "host"


@pytest.fixture
def box(empty_root: Path) -> Box:
    """Two kernels with headers and stock modules; K1 runs, K2 boots next."""
    return furnish(empty_root, K1, K2)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that not even root can write."""
    commands = (["mount", "--bind", folder, folder], ["mount", "-o", "remount,ro,bind", folder])
    mounted = 0
    try:
        for command in commands:
            done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
            mounted = 1
        yield
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def make_clone(box: Box) -> None:
    """Turn the source into a clone: tag VERSION is stock, VERSION-p2p is patched."""
    source = box.root / SOURCE
    for command in (
        ("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message=stock"),
        ("tag", toys.VERSION), ("apply", str(box.root / PATCH)),
        ("commit", "--quiet", "--all", "--message=p2p"), ("tag", f"{toys.VERSION}-p2p"),
    ):  # fmt: skip
        git(source, *command)


def efi_variable(name: str) -> str:
    """Where efivarfs shows a variable of the firmware's own, below the root."""
    return f"sys/firmware/efi/efivars/{name}-8be4df61-93ca-11d2-aa0d-00e098032b8c"
