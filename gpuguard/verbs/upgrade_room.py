"""Is there room on disk for an upgrade: kernels and their images in /boot, the rest elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gpuguard.core.upgrade import Refusal, Upgrade
from gpuguard.host import Host
from gpuguard.probes import apt

_MIB = 1 << 20
_KIB = 1 << 10
_SLACK = 64 * _MIB  # what dpkg and update-initramfs write on the way
_IMAGE = 96 * _MIB  # a kernel and its initramfs, where there is none to go by


def room_refusals(host: Host, upgrade: Upgrade) -> Iterator[Refusal]:
    """File systems without room for what would be installed; sizes are estimates."""
    boot, system = host.path("/boot"), host.path("/usr")
    if not upgrade.changes or not system.exists():
        return
    in_boot = len(upgrade.new_kernels) * _image_size(boot)
    elsewhere = _installed_size(host, upgrade)
    together = boot.exists() and boot.stat().st_dev == system.stat().st_dev
    if in_boot and boot.exists() and not together and (free := _free(boot)) < in_boot:
        yield Refusal(
            code="boot-space",
            message=f"/boot has {free // _MIB} MiB free, {len(upgrade.new_kernels)} new kernels "
            f"need about {in_boot // _MIB} MiB there",
            hint="remove old kernels (apt autoremove --purge) or enlarge /boot",
        )
    needed = elsewhere + _SLACK + (in_boot if together else 0)
    if (free := _free(system)) < needed:
        yield Refusal(
            code="disk-space",
            message=f"/usr has {free // _MIB} MiB free, the upgrade needs about "
            f"{needed // _MIB} MiB",
            hint="make room (apt autoremove --purge, apt clean) and try again",
        )


def _installed_size(host: Host, upgrade: Upgrade) -> int:
    """Bytes that the new versions take; old files go only after the new ones are there."""
    words = [f"{name}={version}" for name, version in upgrade.versions.items()]
    fields = apt.show(host, words)
    sizes = (stanza.get("Installed-Size", "0") for stanza in fields.values())
    return sum(int(size) for size in sizes if size.isdecimal()) * _KIB


def _image_size(boot: Path) -> int:
    """What a kernel takes in /boot: its image, and its initramfs twice while that is made."""
    kinds = ("vmlinuz-*", 1), ("initrd.img-*", 2), ("System.map-*", 1)
    largest = [
        times * max((path.stat().st_size for path in boot.glob(pattern)), default=0)
        for pattern, times in kinds
    ]
    return sum(largest) if boot.is_dir() and all(largest[:1]) else _IMAGE


def _free(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
