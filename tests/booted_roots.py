"""Roots of Debian 12 and 13 that can be booted, with a kernel, dkms and a stand-in driver.

Made once per machine into the test cache, in layers: what mmdebstrap made; above it the driver
from an apt repository of the test's own, built by dkms, and the Python packages that gpuguard
needs. A machine gets an overlay above both. The repository holds one newer kernel, which no
index names yet: a test publishes it when its story wants it. Needs root.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from gpuguard.core.releases import release_key
from tests import standin_packages
from tests.realroot import REPO, Lab, cache_dir, chroot, mounted
from tests.standin_packages import VERSIONS, write_index

_HERE = Path(__file__).parent
_PACKAGES = (
    "apt", "dbus", "dkms", "e2fsprogs", "gcc", "git", "grub-pc", "initramfs-tools", "iproute2",
    "kmod", "libnss-systemd", "libpam-systemd", "linux-base", "make", "openssl", "patch", "procps",
    "python3", "python3-venv", "systemd", "systemd-sysv", "udev", "xz-utils", "zstd",
)  # fmt: skip
#: The kernels without drivers for real hardware: a third of the size, and virtio is in them.
_IMAGE = re.compile(r"linux-image-(\d[\w.+~-]*-cloud-amd64)")
#: What MODULES=list puts into the initramfs: enough to find the disk of a virtual machine.
_BOOT_MODULES = ("virtio_pci", "virtio_blk", "ext4")
_UNUSED_FOR = 24 * 3600.0  # seconds
_CHOSEN_FOR = 7 * 24 * 3600.0  # seconds; then the archive has newer ones
ARCHIVE = "/srv/archive"
METAS = ("linux-image-cloud-amd64", "linux-headers-cloud-amd64")
CLONE = "/srv/nvidia"
PROGRAM = "/opt/gpuguard/bin/gpuguard"
CONFIG = f"""\
source:
  path: {CLONE}
  ref: "{{driver_version}}"
  patches: [/etc/gpuguard/patches/p2p.patch]
p2p:
  expected_gpus: 4
"""


@dataclass(frozen=True)
class Debian:
    """A release of Debian."""

    suite: str
    number: str
    python: str


RELEASES = (Debian("bookworm", "12", "3.11"), Debian("trixie", "13", "3.13"))


class Kernels(NamedTuple):
    """Releases, and the versions of their packages."""

    old: str
    new: str
    old_version: str
    new_version: str


@dataclass(frozen=True)
class Base:
    """Folders of one release in the cache.

    ``layers`` is for overlayfs, the uppermost first; ``old`` is the kernel that is installed,
    ``new`` the one whose packages lie in the repository.
    """

    debian: Debian
    old: str
    new: str
    new_version: str
    layers: tuple[Path, ...]


def missing() -> str | None:
    """Why no such root can be made here, with what helps."""
    if os.geteuid() != 0:
        return "needs root to make and boot a system: sudo make test"
    for program, package in (("mmdebstrap", "mmdebstrap"), ("systemd-nspawn", "systemd-container")):
        if shutil.which(program) is None:
            return f"apt-get install {package}"
    return None


def get_base(debian: Debian) -> Base:
    """The layers of one release; made if the cache has none for what they are made from.

    Raises:
        LookupError: the archive has no two kernels of this release to choose from.
    """
    lab = Lab(cache_dir() / f"apt-{debian.suite}", release=debian.suite)
    with _locked():
        kernels = _kernels(lab, debian)
        key = (debian.suite, *kernels, *_PACKAGES)
        base = _layer("root", key, lambda folder: _make_root(lab, debian, kernels.old, folder))
        kit = (*key, *_digests(), *_requirements())
        driver = _layer(
            "driver", kit, lambda folder: _add_driver(lab, debian, kernels, base, folder)
        )
    return Base(debian, kernels.old, kernels.new, kernels.new_version, (driver, base))


def with_layer(base: Base, kind: str, key: Sequence[str], make: Callable[[Path], None]) -> Base:
    """A base with one more layer above, cached by all that it stands on and by ``key``."""
    below = [layer.name for layer in base.layers]
    with _locked():
        folder = _layer(kind, (base.debian.suite, *below, *key), make)
    return replace(base, layers=(folder, *base.layers))


@contextmanager
def _locked() -> Iterator[None]:
    folder = cache_dir() / "booted"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _kernels(lab: Lab, debian: Debian) -> Kernels:
    """As chosen before on this machine, unless that is a while ago; else of what apt offers."""
    chosen = cache_dir() / "booted" / f"{debian.suite}.json"
    if chosen.exists() and time.time() - chosen.stat().st_mtime < _CHOSEN_FOR:
        return Kernels(*json.loads(chosen.read_text()))
    lab.update()
    kernels = _choose_kernels(lab, debian)
    chosen.write_text(json.dumps(kernels))
    return kernels


def _choose_kernels(lab: Lab, debian: Debian) -> Kernels:
    """The release's own kernel, and the one before it in its series."""
    newest = _IMAGE.search(lab.show("linux-image-cloud-amd64")["Depends"])
    series = re.match(r"\d+\.\d+\.", newest[1]) if newest else None
    known = set(lab.names(f"linux-image-{series[0]}" if series else "linux-image-"))
    known.update(lab.names("linux-headers-"))
    releases = [m[1] for name in known if (m := _IMAGE.fullmatch(name))]
    good = sorted((r for r in releases if f"linux-headers-{r}" in known), key=release_key)
    if len(good) < 2:
        raise LookupError(f"the archive of {debian.suite} has no two cloud kernels: {good}")
    versions = [lab.show(f"linux-image-{release}")["Version"] for release in good[-2:]]
    return Kernels(good[-2], good[-1], *versions)


def _layer(kind: str, key: Sequence[str], make: Callable[[Path], None]) -> Path:
    """A folder below the cache that is complete or not there.

    Others of its kind and suite go, unless a test run may have them mounted.
    """
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:12]
    folder = cache_dir() / "booted" / f"{key[0]}-{kind}-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        for other in folder.parent.glob(f"{key[0]}-{kind}-*"):
            if other.stat().st_mtime < time.time() - _UNUSED_FOR:
                shutil.rmtree(other)
        work = folder.with_name(f".new-{folder.name}")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        make(work)
        work.rename(folder)
    os.utime(folder)
    return folder


def _digests() -> Iterator[str]:
    """Of what the driver layer is made from: the stand-in, and the code that puts it there."""
    standin = REPO / "gpuguard/demo"
    own = [Path(__file__), _HERE / "standin_packages.py"]
    for file in sorted(p for p in standin.rglob("*") if p.is_file() and p.suffix != ".pyc") + own:
        yield hashlib.sha256(file.read_bytes()).hexdigest()


def _requirements() -> list[str]:
    return list(tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"])


def _make_root(lab: Lab, debian: Debian, kernel: str, folder: Path) -> None:
    included = ",".join((*_PACKAGES, f"linux-image-{kernel}", f"linux-headers-{kernel}"))
    settings = "grub-pc grub-pc/install_devices_empty boolean true"
    configure = "mkdir -p $1/etc/initramfs-tools/conf.d $1/etc/kernel; cd $1/etc; " + "; ".join((
        "echo MODULES=list >initramfs-tools/conf.d/lab",
        f"printf '%s\\n' {' '.join(_BOOT_MODULES)} >initramfs-tools/modules",
        f"echo {settings} | chroot $1 debconf-set-selections",
    ))  # fmt: skip
    sources = (lab.folder / "parts/lab.list").read_text().splitlines()
    lines = [line for line in sources if line.startswith("deb ")]
    subprocess.run(
        ["mmdebstrap", "-q", "--variant=minbase", f"--include={included}",
         f"--essential-hook={configure}", debian.suite, folder, *lines],
        check=True,
    )  # fmt: skip
    shutil.rmtree(folder / "var/lib/apt/lists")
    (folder / "etc/hostname").write_text("gpuhost\n")
    (folder / "etc/hosts").write_text("127.0.0.1 localhost gpuhost\n")


def _add_driver(
    lab: Lab,
    debian: Debian,
    kernels: Kernels,
    base: Path,
    folder: Path,
) -> None:
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".work-") as work,
        overlay((base,), Path(work), upper=folder) as root,
    ):
        archive = root / ARCHIVE.lstrip("/")
        archive.mkdir(parents=True)
        for file in lab.download(*_kernel_packages(lab, kernels.new)):
            shutil.copy(file, archive)
        for release, version in zip(kernels[:2], kernels[2:], strict=True):
            standin_packages.make_kernel_metas(archive, release, version)
        for version in (*VERSIONS, standin_packages.UNPATCHED):
            standin_packages.make_driver(archive, version)
        standin_packages.make_broken_dkms(archive)
        standin_packages.make_clone(root / CLONE.lstrip("/"))
        standin_packages.install_patch(root)
        (root / "etc/gpuguard/gpuguard.yaml").write_text(CONFIG)
        (root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{ARCHIVE} ./\n")
        shutil.rmtree(root / "etc/apt/sources.list.d", ignore_errors=True)
        publish(root, *published_at_first(kernels.old_version))
        pretend_release(root, kernels.old)
        with mounted(root):
            chroot(root, "apt-get", "-q", "update")
            chroot(root, "apt-get", "-qy", "install", "nvidia-driver", *METAS, timeout=900)
            chroot(root, "apt-get", "clean")
            _make_venv(root, debian)
            for timer in ("apt-daily", "apt-daily-upgrade"):  # they would take apt's lock
                chroot(root, "systemctl", "mask", "-q", f"{timer}.timer")


def kernel_files(root: Path) -> list[str]:
    """Packages of the newer kernel, as they lie in the repository; its metas not."""
    names = sorted(path.name for path in (root / ARCHIVE.lstrip("/")).glob("linux-*.deb"))
    return [name for name in names if not name.startswith(METAS)]


def published_at_first(kernel_version: str) -> list[str]:
    """Files that the index names before anything has happened: one version of everything."""
    driver = [f"{name}_{VERSIONS[0]}-1" for name in standin_packages.DRIVER_PACKAGES]
    metas = [f"linux-{kind}-cloud-amd64_{kernel_version}" for kind in ("image", "headers")]
    return [f"{name}_amd64.deb" for name in (*driver, *metas)]


def publish(root: Path, *names: str) -> None:
    """Let the repository's index name these files, and no others."""
    archive = root / ARCHIVE.lstrip("/")
    write_index(archive, [archive / name for name in names])


def _kernel_packages(lab: Lab, release: str) -> list[str]:
    """A kernel's image and headers, with what the headers depend on and no older kernel has."""
    wanted = [f"linux-image-{release}", f"linux-headers-{release}"]
    needed = lab.show(f"linux-headers-{release}")["Depends"]
    return wanted + re.findall(r"linux-(?:headers|kbuild)-[\w.+~-]+", needed)


def _make_venv(root: Path, debian: Debian) -> None:
    """What gpuguard needs, for the root's own Python; wheels from where pip gets them here."""
    wheels = root / "tmp/wheels"
    wheels.mkdir()
    platforms = [f"--platform=manylinux{v}_x86_64" for v in ("2014", "_2_17", "_2_28")]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-qq", "--only-binary=:all:",
         f"--python-version={debian.python}", "--implementation=cp", *platforms,
         "-d", wheels, *_requirements()],
        check=True,
    )  # fmt: skip
    venv = str(Path(PROGRAM).parents[1])
    chroot(root, "python3", "-m", "venv", venv)
    command = ("-m", "pip", "install", "-q", "--no-index", "--find-links=/tmp/wheels")
    chroot(root, f"{venv}/bin/python", *command, *_requirements())
    shutil.rmtree(wheels)


def build_wheel(folder: Path) -> Path:
    """gpuguard itself, as it is now."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def install_gpuguard(root: Path, wheel: Path) -> None:
    """Into the virtual environment of a root, as ``pip install`` would."""
    shutil.copy(wheel, root / "tmp")
    python = str(Path(PROGRAM).with_name("python"))
    command = ("-m", "pip", "install", "-q", "--no-index", "--no-deps", f"/tmp/{wheel.name}")
    with mounted(root):
        chroot(root, python, *command)
    (root / "tmp" / wheel.name).unlink()


def pretend_release(root: Path, release: str) -> None:
    """Let ``uname -r`` inside say what ``/proc/sys/kernel/osrelease`` will: see booted.py.

    dkms and its packages ask uname, and the kernel that really runs is the test machine's.
    """
    file = root / "srv/lab/kernel/osrelease"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{release}\n")
    uname = root / "usr/local/bin/uname"
    uname.write_text(
        '#!/bin/sh\n[ "$*" = -r ] && exec cat /srv/lab/kernel/osrelease\nexec /usr/bin/uname "$@"\n'
    )
    uname.chmod(0o755)


@contextmanager
def overlay(layers: Iterable[Path], work: Path, *, upper: Path | None = None) -> Iterator[Path]:
    """A writable view of layers; what is written goes to ``upper``."""
    root, scratch, upper = work / "root", work / "scratch", upper or work / "upper"
    for folder in (root, upper, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    lower = ":".join(map(str, layers))
    options = f"lowerdir={lower},upperdir={upper},workdir={scratch}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", "-l", root], check=False)
