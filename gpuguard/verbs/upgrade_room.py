"""Is there room on disk for an upgrade: kernels and their images in /boot, the rest elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpuguard.core.upgrade import Refusal, Upgrade
from gpuguard.host import Host
from gpuguard.probes import apt
from gpuguard.state import LOGS_DIR

_MIB = 1 << 20
_KIB = 1 << 10
_SLACK = 64 * _MIB  # what dpkg and update-initramfs write on the way
_DATABASE = 32 * _MIB  # dpkg's status file, twice, and its lists of files
_LOG = 8 * _MIB  # of apt, and of builds
_IMAGE = 96 * _MIB  # a kernel and its initramfs, where there is none to go by


def room_refusals(host: Host, upgrade: Upgrade) -> Iterator[Refusal]:
    """File systems without room for what would be installed; sizes are estimates."""
    if not upgrade.changes or not host.path("/usr").exists():
        return
    fields = apt.show(host, [f"{name}={version}" for name, version in upgrade.versions.items()])
    needs = {
        "/boot": len(upgrade.new_kernels) * _image_size(host.path("/boot")),
        # old files go only after the new ones are there
        "/usr": _sum(fields, "Installed-Size") * _KIB + _SLACK,
        "/var/lib/dpkg": _DATABASE,
        "/var/cache/apt/archives": _to_fetch(host, fields),
        LOGS_DIR: _LOG,
    }
    by_device: dict[int, list[str]] = {}
    for folder in needs:
        by_device.setdefault(_existing(host, folder).stat().st_dev, []).append(folder)
    for folders in by_device.values():
        needed = sum(needs[folder] for folder in folders)
        free = _free(_existing(host, folders[0]))
        if needed and free < needed:
            yield _refusal(folders, free, needed, len(upgrade.new_kernels))


def _refusal(folders: list[str], free: int, needed: int, kernels: int) -> Refusal:
    if folders == ["/boot"]:
        return Refusal(
            code="boot-space",
            message=f"/boot has {free // _MIB} MiB free, {kernels} new kernels "
            f"need about {needed // _MIB} MiB there",
            hint="remove old kernels (apt autoremove --purge) or enlarge /boot",
        )
    return Refusal(
        code="disk-space",
        message=f"{', '.join(folders)}: {free // _MIB} MiB free, the upgrade needs about "
        f"{needed // _MIB} MiB",
        hint="make room (apt autoremove --purge, apt clean, old logs) and try again",
    )


def _existing(host: Host, folder: str) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not (path := host.path(folder)).is_dir() and folder != "/":
        folder = str(Path(folder).parent)
    return path


def _to_fetch(host: Host, fields: Mapping[str, Mapping[str, str]]) -> int:
    """Bytes of package files that apt does not have yet."""
    archives = host.path("/var/cache/apt/archives")
    missing = {
        name: stanza
        for name, stanza in fields.items()
        if not (archives / _archive_name(stanza)).is_file()
    }
    return _sum(missing, "Size")


def _archive_name(stanza: Mapping[str, str]) -> str:
    words = (stanza.get(key, "") for key in ("Package", "Version", "Architecture"))
    return "_".join(word.replace(":", "%3a") for word in words) + ".deb"


def _sum(fields: Mapping[str, Mapping[str, str]], key: str) -> int:
    sizes = (stanza.get(key, "0") for stanza in fields.values())
    return sum(int(size) for size in sizes if size.isdecimal())


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
