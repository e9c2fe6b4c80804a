"""Fixtures with real kernels: headers, host trees with stock modules, patched modules.

Made with the demo kit once per machine and kept in a cache folder, ``GPUGUARD_TEST_CACHE`` or
``.cache`` of the repository; what is made from the kit's own files is made anew when one of
them changes. A test gets a copy of its own and may do anything to it but one thing: the files
below ``/usr/src/linux-headers-*`` and ``/usr/lib/linux-kbuild-*`` are hard links. They may be
removed, renamed or replaced, never written in place (``.config``, ``Makefile``,
``Module.symvers`` of a kernel are real copies).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

import gpuguard.demo
from gpuguard.core.facts import MODULE_NAMES
from gpuguard.demo import dkms
from gpuguard.demo.headers import HeadersCache, get_headers
from gpuguard.demo.kernels import link_tree, run_depmod, unshare_headers
from gpuguard.demo.source import apply_patch, build_modules, copy_standin
from gpuguard.demo.tree import boot_into, make_tree
from gpuguard.errors import PreflightError
from gpuguard.host import LocalHost

_KIT = Path(gpuguard.demo.__file__).parent
_LINKED = ("usr/src/linux-headers-*", "usr/lib/linux-kbuild-*")
_NEEDED = {
    "apt-get": "apt",
    "dkms": "dkms",
    "depmod": "kmod",
    "fakeroot": "fakeroot",
    "gcc": "gcc",
    "make": "make",
    "openssl": "openssl",
    "patch": "patch",
}


class HostTree(Protocol):
    """Makes a host tree; see the fixture ``host_tree``."""

    def __call__(self, *, kernels: int = 2, stock: bool = True, name: str = "host") -> Path:
        """Its root."""


@pytest.fixture(scope="session")
def kernel_headers() -> HeadersCache:
    """Headers of two real kernels of one series; ``releases`` has the older one first."""
    missing = [package for program, package in _NEEDED.items() if not _has(program)]
    if missing:
        pytest.skip(f"programs missing; apt-get install {' '.join(missing)}")
    try:
        return get_headers(cache_folder() / "headers")
    except PreflightError as error:
        pytest.skip(f"{error.message}; {error.hint}")


@pytest.fixture
def host_tree(tmp_path: Path, kernel_headers: HeadersCache) -> HostTree:
    """``host_tree(kernels=2, stock=True)``: the root of a tree of the test's own.

    It runs the older kernel, and GRUB will start the newest. ``stock``: DKMS has built and
    installed the stock modules for every kernel. ``kernels=1`` leaves the newer one out.
    """

    def make(*, kernels: int = 2, stock: bool = True, name: str = "host") -> Path:
        return copy_tree(base_tree(kernel_headers, kernels, stock=stock), tmp_path / name)

    return make


@pytest.fixture(scope="session")
def patched_modules(kernel_headers: HeadersCache) -> Callable[[str], Path]:
    """``patched_modules(release)``: a folder with the five modules built from patched source."""

    def build(folder: Path, release: str) -> None:
        with tempfile.TemporaryDirectory() as work:
            source = copy_standin(Path(work) / "source")
            apply_patch(source)
            built = build_modules(source, kernel_headers.root, release)
            for module in built.glob("*.ko"):
                shutil.copyfile(module, folder / module.name)

    return lambda release: _made_once("patched", release, lambda folder: build(folder, release))


def modinfo(module: Path, field: str) -> str:
    """One field of a module, as modinfo(8) prints it."""
    return LocalHost().run("modinfo", "-F", field, str(module), timeout=10).stdout.strip()


def stock_module(root: Path, release: str, name: str = "nvidia") -> Path:
    """Where DKMS installed a module."""
    return root / "lib/modules" / release / "updates/dkms" / f"{name}.ko"


def install_patched(root: Path, release: str, modules: Path) -> None:
    """Put modules beside DKMS's and let depmod prefer them: a patched host without gpuguard."""
    shutil.copytree(modules, root / "lib/modules" / release / "updates/patched")
    overrides = "".join(
        f"override {name} ^{re.escape(release)}$ updates/patched\n" for name in MODULE_NAMES
    )
    (root / "etc/depmod.d/zz-patched.conf").write_text(overrides)
    run_depmod(root, release)


def cache_folder() -> Path:
    """Where the kit keeps what it made."""
    default = Path(__file__).parents[1] / ".cache"
    return Path(os.environ.get("GPUGUARD_TEST_CACHE") or default).resolve()


def base_tree(headers: HeadersCache, kernels: int, *, stock: bool) -> Path:
    """The tree that copies are made from; never to be changed."""
    releases = headers.releases[:kernels]

    def build(root: Path) -> None:
        make_tree(root, headers, releases=releases)
        if stock:
            dkms.install_stock_source(root)
            dkms.dkms_add(root)
            for release in releases:
                dkms.dkms_install(root, release)
            boot_into(root, releases[0])

    kind = "stock" if stock else "bare"
    return _made_once("tree", f"{kind}-{'-'.join(releases)}", build)


def copy_tree(source: Path, target: Path) -> Path:
    """Copy a host tree: the headers, most of its files, as hard links, the rest for real."""
    linked = [path for pattern in _LINKED for path in source.glob(pattern)]
    skip = {str(path) for path in linked}
    shutil.copytree(
        source,
        target,
        symlinks=True,
        ignore=lambda folder, names: [name for name in names if f"{folder}/{name}" in skip],
    )
    for path in linked:
        link_tree(path, target / path.relative_to(source))
    unshare_headers(target)
    return target


def _made_once(kind: str, name: str, build: Callable[[Path], None]) -> Path:
    folder = cache_folder() / kind / f"{_kit_digest()}-{name}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as work:
                fresh = Path(work) / "made"
                fresh.mkdir()
                build(fresh)
                fresh.rename(folder)
            _drop_outdated(folder)
    return folder


def _drop_outdated(folder: Path) -> None:
    """Drop what an earlier kit made under this name, unless a running test may be copying it."""
    name = folder.name.split("-", 1)[1]
    yesterday = time.time() - 24 * 60 * 60
    for other in folder.parent.glob(f"*-{name}"):
        if other != folder and other.stat().st_mtime < yesterday:
            shutil.rmtree(other)


def _kit_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in _KIT.rglob("*") if path.suffix != ".pyc"):
        if file.is_file():
            digest.update(f"{file.relative_to(_KIT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _has(program: str) -> bool:
    return LocalHost().has_program(program)
