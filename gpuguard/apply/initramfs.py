"""Rebuild the initial RAM disk of one kernel with the tool that the host has."""

from __future__ import annotations

import os

from gpuguard.apply.own_tool import run_own_tool
from gpuguard.errors import PreflightError
from gpuguard.host import Host

TOOL_SECONDS = 900.0  # a large MODULES=most image on a slow disk takes minutes
_ROOM_FACTOR = 1.3  # the new image is written beside the old one
_UPDATE = "/usr/sbin/update-initramfs"  # initramfs-tools; newer Ubuntu ships it with dracut, too
_DRACUT = ("/usr/bin/dracut", "/usr/sbin/dracut")


def side_files(path: str) -> tuple[str, str]:
    """What the tools write beside an image: the new one under way, the old one kept."""
    return f"{path}.new", f"{path}.dpkg-bak"


def initramfs_command(release: str, path: str, host: Host) -> tuple[str, ...]:
    """What to run inside the host, e.g. ``update-initramfs -u -k RELEASE``.

    Raises:
        PreflightError: neither initramfs-tools nor dracut is installed.
    """
    if host.path(_UPDATE).exists():
        return (_UPDATE, "-u", "-k", release)
    for dracut in _DRACUT:
        if host.path(dracut).exists():
            return (dracut, "--force", path, release)
    raise PreflightError(
        f"{path} carries NVIDIA modules, and there is neither update-initramfs nor dracut",
        code="initramfs-tool-missing",
        hint="apt install initramfs-tools",
    )


def check_initramfs_possible(release: str, path: str, host: Host) -> None:
    """Before anything is touched: a tool, room in /boot, and a way into another root.

    Raises:
        PreflightError: with what to do.
    """
    initramfs_command(release, path, host)
    image = host.path(path)
    room = os.statvfs(image.parent)
    needed = int(image.stat().st_size * _ROOM_FACTOR)
    if (free := room.f_bavail * room.f_frsize) < needed:
        raise PreflightError(
            f"{path} must be rebuilt: {needed >> 20} MiB needed beside it, {free >> 20} MiB free",
            code="boot-space",
            hint="remove old kernels (apt autoremove --purge) or enlarge /boot",
        )
    if not host.is_live and os.geteuid() != 0:
        raise PreflightError(
            f"{path} must be rebuilt by the tree's own tools, which needs root",
            code="initramfs-needs-root",
            hint="run gpuguard with sudo",
        )


def rebuild_initramfs(release: str, path: str, host: Host) -> None:
    """Rebuild exactly one image (never ``-k all``).

    Raises:
        VerifyError: the tool failed.
    """
    run_own_tool(
        host,
        path,
        initramfs_command(release, path, host),
        timeout=TOOL_SECONDS,
        code="initramfs-failed",
        failed="could not be rebuilt",
    )
