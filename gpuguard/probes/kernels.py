"""Which kernels there are: module trees, images, the running one."""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gpuguard.core.releases import release_key
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text, real_path

#: Both, because /lib is a real directory on hosts that are not usr-merged.
_MODULE_ROOTS = ("/lib/modules", "/usr/lib/modules")
_IMAGE_PREFIXES = ("vmlinuz-", "vmlinux-")
_RELEASE = re.compile(r"\d+\.\d+[\w.+~-]*", re.ASCII)
#: What package tools and people leave beside an image; none of it is a kernel release.
_LEFTOVER = re.compile(r"[.](old|bak|orig|dpkg-\w+|efi|signed|tmp|new)$|~$")
_SUFFIXES = {".ko": "", ".ko.gz": ".gz", ".ko.xz": ".xz", ".ko.zst": ".zst"}
_SAMPLES = 5


def is_release(name: str) -> bool:
    """True if a name can be a kernel release: ``6.1.0-47-amd64``, not ``0-rescue-5f3a``."""
    return bool(_RELEASE.fullmatch(name)) and not _LEFTOVER.search(name)


def probe_releases(host: Host) -> tuple[tuple[str, str | None], ...]:
    """Kernel releases with their image, oldest first; a leftover tree has image None.

    Raises:
        ProbeError: ``/boot`` or the module trees cannot be read. Without them a kernel in
            use and a leftover folder look the same.
    """
    images = _images_in_boot(host)
    trees = {
        name: f"{root}/{name}"
        for root in reversed(_MODULE_ROOTS)
        for name in list_dir(host, root)
        if is_release(name) and _is_dir(host, f"{root}/{name}")
    }
    releases = sorted(images.keys() | trees.keys(), key=release_key)
    return tuple((r, images.get(r) or _image_in_tree(host, trees.get(r))) for r in releases)


def _images_in_boot(host: Host) -> dict[str, str]:
    images: dict[str, str] = {}
    for name in list_dir(host, "/boot"):
        prefix = next((p for p in _IMAGE_PREFIXES if name.startswith(p)), None)
        if prefix is None or not is_release(release := name.removeprefix(prefix)):
            continue
        if real_path(host, f"/boot/{name}") is not None:  # not a dangling link
            images.setdefault(release, f"/boot/{name}")
    return images


def _is_dir(host: Host, absolute: str) -> bool:
    path = real_path(host, absolute)
    return path is not None and path.is_dir()


def _image_in_tree(host: Host, tree: str | None) -> str | None:
    # Where kernel-install(8) and ostree hosts keep the image.
    if tree is None or real_path(host, f"{tree}/vmlinuz") is None:
        return None
    return f"{tree}/vmlinuz"


def probe_running(host: Host) -> str | None:
    """The running kernel's release; None in a tree without /proc.

    Never ``uname``: with ``--root`` that would be the wrong machine's.
    """
    try:
        text = read_text(host, "/proc/sys/kernel/osrelease")
    except ProbeError:
        return None
    return (text or "").strip() or None


def probe_suffix(host: Host, release: str) -> str:
    """How this kernel's own modules are compressed: "", ".gz", ".xz", ".zst".

    Files below ``kernel/`` decide, without NVIDIA's: Ubuntu links pre-built ones into
    ``kernel/nvidia-580-open/``. ``CONFIG_MODULE_COMPRESS_*`` does not decide: Ubuntu 22.04
    sets ZSTD and ships plain files (CASES C19).
    """
    kernel_dir = real_path(host, f"/lib/modules/{release}/kernel")
    if kernel_dir is None:
        return ""
    names = (name for name in _module_names(kernel_dir) if not name.startswith("nvidia"))
    found = Counter(name[name.index(".ko") :] for name in islice(names, _SAMPLES))
    return _SUFFIXES[found.most_common(1)[0][0]] if found else ""


def _module_names(directory: Path) -> Iterator[str]:
    """Names of module files, files of a directory before its subdirectories."""
    subdirectories = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    subdirectories.append(Path(entry.path))
                elif (at := entry.name.find(".ko")) > 0 and entry.name[at:] in _SUFFIXES:
                    yield entry.name
    except OSError:
        return
    for subdirectory in subdirectories:
        yield from _module_names(subdirectory)


def release_of_image(path: Path) -> str | None:
    """The release that an x86 kernel image states in its own boot header, else None.

    For images whose name does not say (``/EFI/Pop_OS-…/vmlinuz.efi``). Offsets as in the
    kernel's ``Documentation/arch/x86/boot.rst``: "HdrS" at 0x202, at 0x20E the offset of
    the version string less 0x200.
    """
    try:
        with path.open("rb") as file:
            header = file.read(0x210)
            if len(header) < 0x210 or header[0x202:0x206] != b"HdrS":  # noqa: PLR2004
                return None
            file.seek(0x200 + struct.unpack_from("<H", header, 0x20E)[0])
            words = file.read(128).split(b"\0")[0].split()
    except OSError:
        return None
    release = words[0].decode("ascii", "replace") if words else ""
    return release if is_release(release) else None


def release_of_image_name(name: str) -> str | None:
    """``6.1.0-47-amd64`` of ``vmlinuz-6.1.0-47-amd64`` (also ``….efi.signed``), else None."""
    for prefix in _IMAGE_PREFIXES:
        if name.startswith(prefix):
            release = name.removeprefix(prefix).removesuffix(".signed").removesuffix(".efi")
            return release if is_release(release) else None
    return None
