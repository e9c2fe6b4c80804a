"""Toy kernel modules: real ELF objects with .modinfo and a build-id, made in milliseconds.

kmod's tools (depmod, modinfo, modprobe --show-depends) take them for real ones; nothing
here can be loaded. The source of a toy is its text, so equal arguments give equal files.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

VERSION = "999.10.01"
NAMES = ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem")


def toy_module(
    path: Path,
    *,
    name: str = "nvidia",
    release: str = "6.8.0-90-generic",
    version: str = VERSION,
    seed: str = "stock",
    build_id: bool = True,
) -> Path:
    """Write a toy module to a path (with .xz or .zst it is compressed by the real tools)."""
    content = _toy(name, release, version, seed, build_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".ko":
        path.write_bytes(content)
    else:
        tool = {".xz": ("xz", "--check=crc32"), ".zst": ("zstd", "-q"), ".gz": ("gzip",)}
        command = [*tool[path.suffix], "-c"]
        done = subprocess.run(command, input=content, stdout=subprocess.PIPE, check=True)
        path.write_bytes(done.stdout)
    return path


@cache
def _toy(name: str, release: str, version: str, seed: str, build_id: bool) -> bytes:
    import tempfile

    info = {
        "version": version,
        "license": "Dual MIT/GPL",
        "srcversion": "0123456789ABCDEF0123456",
        "depends": "",
        "name": name.replace("-", "_"),
        "vermagic": f"{release} SMP preempt mod_unload modversions ",
    }
    lines = [
        f'static const char i{n}[] __attribute__((section(".modinfo"),used)) = "{key}={value}";'
        for n, (key, value) in enumerate(info.items())
    ]
    # in .data, so that the build-id depends on it as it does on a patched core object
    lines.append(f'const char core_object[] = "standin-p2p-policy={seed}";')
    with tempfile.TemporaryDirectory() as folder:
        source, thing, module = (Path(folder) / f for f in ("toy.c", "toy.o", "toy.ko"))
        source.write_text("\n".join(lines) + "\n")
        subprocess.run(["gcc", "-c", "-o", thing, source], check=True)
        flag = "--build-id=sha1" if build_id else "--build-id=none"
        subprocess.run(["ld", "-r", flag, "-o", module, thing], check=True)
        return module.read_bytes()


def toy_kernel(root: Path, release: str, *, image: bool = True, headers: bool = False) -> Path:
    """A module tree with one module of the kernel's own, and an image; returns the tree."""
    tree = root / "lib/modules" / release
    toy_module(tree / "kernel/net/dummy.ko", name="dummy", release=release)
    (tree / "modules.order").write_text("kernel/net/dummy.ko\n")
    (tree / "modules.builtin").write_text("")
    if image:
        (root / "boot").mkdir(exist_ok=True)
        (root / f"boot/vmlinuz-{release}").write_bytes(b"placeholder kernel image")
    if headers:
        (tree / "build").mkdir()
    return tree


def stock_modules(root: Path, release: str, *, suffix: str = "", seed: str = "stock") -> None:
    """What DKMS would have put into updates/dkms, then depmod."""
    for name in NAMES:
        path = root / "lib/modules" / release / "updates/dkms" / f"{name}.ko{suffix}"
        toy_module(path, name=name, release=release, seed=f"{seed} {name}")
    depmod(root, release)


def depmod(root: Path, release: str) -> None:
    """The real depmod, on the tree alone."""
    config = root / "etc/depmod.d"
    config.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["/usr/sbin/depmod", "-b", root, "-C", config, release], check=True, capture_output=True
    )


def set_next(root: Path, release: str) -> None:
    """The /vmlinuz link, as Debian keeps it."""
    link = root / "vmlinuz"
    link.unlink(missing_ok=True)
    link.symlink_to(f"boot/vmlinuz-{release}")


def set_running(root: Path, release: str) -> None:
    """The release that the tree says runs."""
    path = root / "proc/sys/kernel/osrelease"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{release}\n")


def snapshot(root: Path, *, without: tuple[str, ...] = ("var/lib/gpuguard",)) -> dict[str, str]:
    """Every path below a root with its kind, mode and content; for exact comparisons."""
    import hashlib

    found = {}
    for path in sorted(root.rglob("*")):
        inside = str(path.relative_to(root))
        if inside.startswith(without):
            continue
        if path.is_symlink():
            found[inside] = f"link {path.readlink()}"
        elif path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[inside] = f"file {path.stat().st_mode:o} {digest}"
        else:
            found[inside] = "dir"
    return found
