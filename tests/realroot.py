"""A real Debian root with real kernels, real headers, the real dkms and NVIDIA's packages.

Made once per machine with mmdebstrap into the test cache, from the mirror that the
machine's own apt names; tests work on a copy. Needs root. Nothing of it is committed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parent.parent
_BASE_PACKAGES = (
    "apt", "ca-certificates", "dkms", "g++-12", "gcc-12", "git", "initramfs-tools", "kmod",
    "openssl", "patch", "procps", "python3", "xz-utils", "zstd",
)  # fmt: skip
#: Kernel ABIs of Debian 12 by what NVIDIA 535.261.03 does on them; see LAB facts in the README.
COMPILES = ("6.1.0-47", "6.1.0-50")
DOES_NOT_COMPILE = ("6.1.0-53", "6.1.0-54")


@dataclass(frozen=True)
class RealParts:
    """What the distribution offers today: two kernels that compile, one that does not."""

    old: str
    new: str
    broken: str


def cache_dir() -> Path:
    """Where tests keep what is expensive to make."""
    return Path(os.environ.get("GPUGUARD_TEST_CACHE", REPO / ".cache"))


def choose_parts(names: Sequence[str]) -> RealParts | None:
    """Pick kernels from the names of header packages that apt knows; None: a part is gone."""
    offered = {name.removeprefix("linux-headers-").removesuffix("-amd64") for name in names}
    good = [abi for abi in COMPILES if abi in offered]
    bad = [abi for abi in DOES_NOT_COMPILE if abi in offered]
    if len(good) < 2 or not bad:
        return None
    return RealParts(*(f"{abi}-amd64" for abi in (good[0], good[1], bad[0])))


class Lab:
    """apt with contrib and deb-src, in a folder of its own: the machine's sources stay.

    ``release``: code name of another release of Debian, looked for on the same mirror.
    """

    def __init__(self, folder: Path, release: str = "") -> None:
        self.folder = folder
        self._release = release
        self._options = [
            "-o", "Dir::Etc::sourcelist=/dev/null",
            "-o", f"Dir::Etc::sourceparts={folder}/parts",
            "-o", f"Dir::State::lists={folder}/lists",
            "-o", f"Dir::Cache={folder}/cache",
            "-o", "APT::Sandbox::User=root",
        ]  # fmt: skip

    def update(self) -> None:
        for name in ("parts", "lists/partial", "cache/archives/partial", "debs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        lines = _sources(self._release)
        (self.folder / "parts/lab.list").write_text("\n".join(lines) + "\n")
        self.apt("update", "-q")

    def apt(self, *argv: str) -> str:
        command = ["apt-get", *self._options, *argv]
        return subprocess.run(
            command, check=True, text=True, stdout=subprocess.PIPE, cwd=self.folder / "debs"
        ).stdout

    def names(self, pattern: str) -> list[str]:
        command = ["apt-cache", *self._options, "pkgnames", pattern]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.split()

    def show(self, package: str) -> dict[str, str]:
        """Fields of a package's candidate."""
        command = ["apt-cache", *self._options, "show", "--no-all-versions", package]
        text = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
        pairs = (line.split(": ", 1) for line in text.splitlines() if ": " in line)
        return {name: value for name, value in pairs if not name.startswith(" ")}

    def download(self, *packages: str) -> list[Path]:
        """Package files, downloaded once."""
        missing = [p for p in packages if not list((self.folder / "debs").glob(f"{p}_*.deb"))]
        if missing:
            self.apt("download", "-q", *missing)
        return [next((self.folder / "debs").glob(f"{package}_*.deb")) for package in packages]

    def with_needs(self, root: Path, *packages: str) -> list[Path]:
        """Files of packages, and of what they need beyond what a root has; downloaded once."""
        status = root / "var/lib/dpkg/status"
        words = ("-o", f"Dir::State::status={status}", "--no-install-recommends", "-qy", "install")
        if not (self.folder / "parts/lab.list").exists():
            self.update()
        try:
            self.apt(*words, "--download-only", *packages)
        except subprocess.CalledProcessError:  # lists that are days old name files that are gone
            self.update()
            self.apt(*words, "--download-only", *packages)
        said = self.apt(*words, "-s", *packages)
        planned = re.findall(r"^Inst (\S+) .*?\((\S+) ", said, re.MULTILINE)
        archives = self.folder / "cache/archives"
        names = [f"{name}_{version.replace(':', '%3a')}_*.deb" for name, version in planned]
        return [next(archives.glob(name)) for name in names]


def _sources(wanted: str = "") -> list[str]:
    """The machine's own Debian mirror, with contrib and sources, as one-line entries."""
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)",
         "Created-By: Packages", "Origin: Debian"],
        check=True, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    places = sorted({tuple(line.split()[:2]) for line in done.stdout.splitlines() if line})
    lines = []
    for uri, own in places:
        release = own.replace(suite(), wanted) if wanted else own
        entry = f"{uri} {release} main contrib non-free non-free-firmware"
        lines += [f"deb {entry}", f"deb-src {entry}"]
    return lines


def suite() -> str:
    """Debian's code name of this machine."""
    text = Path("/etc/os-release").read_text()
    match = re.search(r"^VERSION_CODENAME=(\w+)", text, re.MULTILINE)
    return match[1] if match else ""


def make_root(lab: Lab, parts: RealParts, target: Path) -> None:
    """mmdebstrap, two kernels with images, headers and initramfs; then NVIDIA's own DKMS package.

    The stock modules for both kernels are built by dkms, run by the package's postinst.
    """
    if (target / "stamp").exists():
        return
    work = target.with_name(target.name + ".new")
    shutil.rmtree(work, ignore_errors=True)
    kernels = [f"linux-{kind}-{r}" for r in (parts.old, parts.new) for kind in ("headers", "image")]
    lines = (lab.folder / "parts/lab.list").read_text().splitlines()
    deb_lines = [line for line in lines if line.startswith("deb ")]
    included = ",".join((*_BASE_PACKAGES, *kernels))
    subprocess.run(
        ["mmdebstrap", "-q", "--variant=minbase", f"--include={included}",
         "--essential-hook=mkdir -p $1/etc/initramfs-tools/conf.d",
         "--essential-hook=echo MODULES=list >$1/etc/initramfs-tools/conf.d/lab",
         suite(), work, *deb_lines],
        check=True,
    )  # fmt: skip
    _install_nvidia(lab, work)
    (work / "stamp").write_text("complete\n")
    work.rename(target)


def _install_nvidia(lab: Lab, root: Path) -> None:
    packages = ["nvidia-open-kernel-dkms", "nvidia-open-kernel-support", "nvidia-kernel-common"]
    files = lab.download(*packages)
    support = next(f for f in files if f.name.startswith("nvidia-open-kernel-support"))
    subprocess.run(["dpkg-deb", "-x", support, root], check=True)
    # what Debian's alternatives system would do once a card's firmware packages are there
    link = root / "etc/modprobe.d/nvidia.conf"
    link.symlink_to("/etc/nvidia/current-open/nvidia-modprobe.conf")
    shutil.copy(files[0], root / "tmp/nvidia.deb")
    with mounted(root):
        # firmware and glx packages that need a card's host are left out
        chroot(root, "dpkg", "--force-depends", "-i", "/tmp/nvidia.deb", timeout=3600)
    (root / "tmp/nvidia.deb").unlink()
    library = root / "usr/lib/x86_64-linux-gnu/nvidia/current"
    library.mkdir(parents=True)
    version = driver_version(root)
    (library / f"libnvidia-ml.so.{version}").write_bytes(b"")
    (library / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")


def driver_version(root: Path) -> str:
    """The full version of NVIDIA's DKMS package in the root."""
    source = next((root / "usr/src").glob("nvidia-current-open-*"))
    return source.name.removeprefix("nvidia-current-open-")


def nvidia_source(lab: Lab, target: Path) -> Path:
    """The whole open module source, as the distribution's source package has it."""
    if not target.is_dir():
        lab.apt("source", "-q", "--download-only", "--tar-only", "nvidia-open-gpu-kernel-modules")
        tar = next((lab.folder / "debs").glob("nvidia-open-gpu-kernel-modules_*.orig.tar.*"))
        work = target.with_name(target.name + ".new")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        options = ("--strip-components=1", "--no-same-owner")
        subprocess.run(["tar", "-C", work, *options, "-xf", tar], check=True)
        work.rename(target)
    return target


def install_gpuguard(root: Path) -> None:
    """gpuguard and what it needs, for the root's own Python."""
    target = root / "opt/gpuguard"
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", target, REPO],
        check=True,
    )


@contextmanager
def working_copy(lower: Path, work: Path) -> Iterator[Path]:
    """A writable view of a root: an overlay, which costs no copy of its gigabytes."""
    root, upper, scratch = work / "root", work / "upper", work / "scratch"
    for folder in (root, upper, scratch):
        folder.mkdir(parents=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={scratch}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", "-l", root], check=False)


@contextmanager
def mounted(root: Path) -> Iterator[None]:
    """/proc and /dev for programs inside; taken away again on every way out."""
    mounts = [("-t", "proc", "proc", root / "proc"), ("--rbind", "/dev", root / "dev")]
    done: list[Path] = []
    try:
        for *arguments, place in mounts:
            subprocess.run(["mount", *map(str, arguments), str(place)], check=True)
            done.append(Path(place))
        yield
    finally:
        for place in reversed(done):
            subprocess.run(["umount", "-l", "-R", place], check=False)


def chroot(
    root: Path, *argv: str, timeout: float = 600, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a program of the root; stdout and stderr are kept."""
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "DEBIAN_FRONTEND": "noninteractive",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": "/opt/gpuguard",
        "HOME": "/root",
    }
    done = subprocess.run(
        ["chroot", str(root), *argv],
        env=environment, text=True, capture_output=True, timeout=timeout, check=False,
    )  # fmt: skip
    if check and done.returncode != 0:
        raise AssertionError(f"{argv} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def gpuguard(
    root: Path, *argv: str, timeout: float = 3600, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run gpuguard inside the root, where it is the live system."""
    return chroot(root, "python3", "-m", "gpuguard", *argv, timeout=timeout, check=check)
