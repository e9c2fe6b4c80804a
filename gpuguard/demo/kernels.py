"""Kernels of a demo tree: what the image and the headers packages of one release put there.

Headers are real, and so is the one module below ``kernel/``, compiled against them. The
images are placeholders: nothing can boot a demo tree.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from gpuguard.demo.bootloader import update_boot
from gpuguard.demo.dpkg import write_dpkg_status
from gpuguard.demo.headers import header_paths, source_dir
from gpuguard.errors import CommandError
from gpuguard.host import LocalHost

_SAMPLE = Path(__file__).parent / "sample"
_SAMPLE_MODULE = "kernel/lib/gpuguard_sample.ko"
_COMPRESS = {
    "": (),
    ".xz": ("xz", "--check=crc32", "--lzma2=dict=1MiB"),  # what the kernel can unpack
    ".zst": ("zstd", "-q", "--rm"),
}
# Small files that a person or a test may edit in place; as hard links they would change in
# the cache, and in every other tree.
_NEVER_LINKED = (".config", "Makefile", "Module.symvers", ".kernelvariables")


def add_kernel(
    root: Path, release: str, headers: Path, *, suffix: str = "", default: str = "0"
) -> None:
    """Install one kernel with its headers, as apt would, up to and including ``update-grub``.

    Args:
        root: the tree.
        release: a release whose headers the cache holds.
        headers: root of that cache (``HeadersCache.root``).
        suffix: how the kernel's own modules are compressed: "", ".xz" or ".zst".
        default: GRUB_DEFAULT.
    """
    install_headers(root, release, headers)
    _install_image(root, release, headers)
    _install_modules(root, release, headers, suffix)
    run_depmod(root, release)
    update_boot(root, default=default)
    write_dpkg_status(root, headers)


def remove_kernel(root: Path, release: str) -> None:
    """Take one kernel away as ``apt purge`` would; what others put below it goes too."""
    for name in ("vmlinuz", "config", "initrd.img"):
        (root / "boot" / f"{name}-{release}").unlink(missing_ok=True)
    shutil.rmtree(root / "lib" / "modules" / release, ignore_errors=True)
    shutil.rmtree(root / "usr/src" / f"linux-headers-{release}", ignore_errors=True)
    update_boot(root)
    write_dpkg_status(root)


def install_headers(root: Path, release: str, headers: Path) -> None:
    """Put a kernel's headers into the tree, hard-linked to the cache where that can be."""
    for path in header_paths(headers, release):
        link_tree(headers / path, root / path)
    unshare_headers(root)
    modules = root / "lib" / "modules" / release
    modules.mkdir(parents=True, exist_ok=True)
    for name in ("build", "source"):
        (modules / name).unlink(missing_ok=True)
        (modules / name).symlink_to((headers / "lib/modules" / release / name).readlink())


def run_depmod(root: Path, release: str) -> None:
    """Run ``depmod`` for one kernel of the tree, with the tree's configuration alone."""
    configuration = root / "etc" / "depmod.d"
    configuration.mkdir(parents=True, exist_ok=True)
    # without -C it would read this machine's /etc/depmod.d
    LocalHost().run("depmod", "-b", str(root), "-C", str(configuration), release, timeout=60)


def link_tree(source: Path, target: Path) -> None:
    """Copy a folder by hard links, or file by file where the file system will not have them."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        LocalHost().run("cp", "-al", str(source), str(target), timeout=300)
    except CommandError:
        shutil.rmtree(target, ignore_errors=True)
        LocalHost().run("cp", "-a", str(source), str(target), timeout=600)


def unshare_headers(root: Path) -> None:
    """Make copies of the few header files that may be edited in place; the rest stays linked."""
    for name in _NEVER_LINKED:
        for file in (root / "usr/src").glob(f"linux-headers-*/{name}"):
            if file.stat().st_nlink > 1:
                content = file.read_bytes()
                file.unlink()
                file.write_bytes(content)


def _install_image(root: Path, release: str, headers: Path) -> None:
    boot = root / "boot"
    boot.mkdir(parents=True, exist_ok=True)
    (boot / f"vmlinuz-{release}").write_text(
        f"Placeholder for Linux {release} in a tree made by gpuguard demo; it cannot be booted.\n"
    )
    config = headers / "usr/src" / f"linux-headers-{release}" / ".config"
    shutil.copyfile(config, boot / f"config-{release}")
    (boot / f"initrd.img-{release}").write_bytes(cpio_archive({"init": b"#!/bin/sh\n"}))


def cpio_archive(files: dict[str, bytes]) -> bytes:
    """A ``newc`` archive, cpio(5): what the kernel unpacks as initial RAM disk."""
    parts = []
    for inode, (name, content) in enumerate([*files.items(), ("TRAILER!!!", b"")], start=1):
        mode = 0 if name == "TRAILER!!!" else 0o100755
        fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        parts += [_padded(header + name.encode() + b"\0"), _padded(content)]
    return b"".join(parts)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _install_modules(root: Path, release: str, headers: Path, suffix: str) -> None:
    tree = root / "lib" / "modules" / release
    module = tree / _SAMPLE_MODULE
    module.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_sample_module(headers, release), module)
    if compress := _COMPRESS[suffix]:
        LocalHost().run(*compress, str(module), timeout=60)
    (tree / "modules.order").write_text(f"{_SAMPLE_MODULE}\n")
    (tree / "modules.builtin").write_text("kernel/fs/ext4/ext4.ko\n")
    (tree / "modules.builtin.modinfo").write_bytes(b"ext4.license=GPL\0ext4.file=fs/ext4/ext4\0")


def _sample_module(headers: Path, release: str) -> Path:
    """The sample compiled for a release; made once per cache."""
    module = headers / "samples" / release / "gpuguard_sample.ko"
    if not module.exists():
        module.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=module.parent) as work:
            for file in _SAMPLE.iterdir():
                shutil.copyfile(file, Path(work) / file.name)
            _kbuild(headers, release, Path(work))
            (Path(work) / module.name).rename(module)
    return module


def _kbuild(headers: Path, release: str, work: Path) -> None:
    LocalHost().run(
        "make", "-C", str(headers / source_dir(headers, release)),
        f"KBUILD_OUTPUT={headers / 'usr/src' / f'linux-headers-{release}'}",
        f"M={work}", f"-j{os.cpu_count() or 1}", "modules",
        timeout=300,
    )  # fmt: skip
