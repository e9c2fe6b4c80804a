"""Which kernel the next boot starts: the boot loader's answer, not the highest number.

Out of scope: Raspberry Pi firmware, kexec; extlinux is seen, not read. ``/etc/default/grub`` is
no evidence: it says what the next ``update-grub`` would write.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpuguard.core.facts import NextKernel
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import read_text, real_path
from gpuguard.probes import systemd_boot
from gpuguard.probes.efivars import read_loader_variable
from gpuguard.probes.grub import default_entry, parse_grub_config
from gpuguard.probes.kernels import release_of_image, release_of_image_name

_GRUB_FOLDERS = ("/boot/grub", "/boot/grub2")
_EXTLINUX = ("/boot/extlinux/extlinux.conf", "/boot/syslinux/extlinux.conf", "/extlinux.conf")
#: Where the file system may be mounted that a loader's path starts at: its own, /boot, the ESP.
_MOUNTS = ("/boot", "", "/boot/efi", "/efi")
_LINKS = ("/vmlinuz", "/boot/vmlinuz")


def probe_next_kernel(host: Host, installed_releases: Sequence[str]) -> NextKernel:
    """What the boot loader will start if nobody touches a key.

    GRUB, systemd-boot, extlinux, then the ``/vmlinuz`` link. A loader that is there but whose
    answer cannot be read ends the search: a later source would be a guess. The release may be
    one that is not installed.
    """
    loaders = {
        "grub": _from_grub,
        "systemd-boot": _from_systemd_boot,
        "extlinux": _from_extlinux,
        "/vmlinuz": _from_link,
    }
    source = "none"
    try:
        if "systemd-boot" in read_loader_variable(host, "LoaderInfo"):  # it booted this system
            loaders = {"systemd-boot": _from_systemd_boot, **loaders}
        for name, probe in loaders.items():
            source = name
            if found := probe(host, installed_releases):
                return found
    except ProbeError as error:
        return NextKernel(release=None, source=source, reason=error.message)
    return NextKernel(
        release=None, source="none", reason="no GRUB menu, systemd-boot entry or /vmlinuz link"
    )


def _from_grub(host: Host, _installed: Sequence[str]) -> NextKernel | None:
    for folder in _GRUB_FOLDERS:
        config = f"{folder}/grub.cfg"
        text = read_text(host, config)
        if text is not None:
            return _from_grub_config(host, text, folder)
    return None


def _from_grub_config(host: Host, text: str, folder: str) -> NextKernel:
    try:
        menu = parse_grub_config(text, lambda path: read_text(host, path), folder=folder)
        entry, note = default_entry(menu)
    except ProbeError as error:
        raise ProbeError(f"{folder}/grub.cfg: {error.message}") from error
    release = release_of_kernel(host, entry.kernel) if entry.kernel else None
    if release is None:
        what = f"starts {entry.kernel}" if entry.kernel else "starts no Linux kernel"
        raise ProbeError(f"{folder}/grub.cfg: the default entry '{entry.title}' {what}")
    return NextKernel(
        release=release,
        source="grub",
        reason=note or f"entry '{entry.title}'",
        initrds=tuple(dict.fromkeys(_in_host(host, path) for path in entry.initrds)),
        command_line=" ".join(entry.arguments),
    )


def _in_host(host: Host, path: str) -> str:
    """Where a file lies that GRUB names; as GRUB names it, if it is not found."""
    path = re.sub(r"^\([^)]*\)", "", path)
    name = path.rpartition("/")[2]
    places = (*(f"{mount}{path}" for mount in _MOUNTS), f"/boot/{name}")  # last: a subvolume
    return next((place for place in places if real_path(host, place) is not None), path)


def release_of_kernel(host: Host, kernel: str) -> str | None:
    """The release of ``/boot/vmlinuz-R``, ``/vmlinuz-R`` or ``/@/boot/vmlinuz-R``.

    GRUB's path starts at a file system (a separate /boot, a btrfs subvolume), so only its
    last part means something here. ``/vmlinuz`` is followed where the host has it.
    """
    name = kernel.rpartition("/")[2]
    if release := release_of_image_name(name):
        return release
    return next(
        filter(None, (_release_of_link(host, link) for link in (f"/boot/{name}", f"/{name}"))), None
    )


def _release_of_link(host: Host, link: str) -> str | None:
    path = real_path(host, link)
    if path is None:
        return None
    return release_of_image_name(path.name) or release_of_image(path)


def _from_systemd_boot(host: Host, installed: Sequence[str]) -> NextKernel | None:
    entry = systemd_boot.next_entry(host, installed)
    if entry is None:
        return None
    return NextKernel(
        release=entry.release,
        source="systemd-boot",
        reason=f"entry '{entry.identifier}'",
        initrds=entry.initrds,
        command_line=entry.command_line,
    )


def _from_extlinux(host: Host, _installed: Sequence[str]) -> NextKernel | None:
    for path in _EXTLINUX:
        if real_path(host, path) is not None:
            raise ProbeError(f"{path} decides, which gpuguard does not read")
    return None


def _from_link(host: Host, _installed: Sequence[str]) -> NextKernel | None:
    for link in _LINKS:
        if release := _release_of_link(host, link):
            return NextKernel(release=release, source="/vmlinuz", reason=f"link {link}")
    return None
