"""The boot loader's menu, made anew by its own tool."""

from __future__ import annotations

from gpuguard.apply.own_tool import run_own_tool
from gpuguard.errors import PreflightError
from gpuguard.host import Host

_TOOL_SECONDS = 600.0  # os-prober looks at every disk
_UPDATE = "/usr/sbin/update-grub"
_MKCONFIG = ("/usr/sbin/grub-mkconfig", "/usr/sbin/grub2-mkconfig")


def menu_files(path: str) -> tuple[str, str]:
    """The menu, and the new one that its tool writes beside it."""
    return path, f"{path}.new"


def menu_command(path: str, host: Host) -> tuple[str, ...]:
    """What to run inside the host: ``update-grub``.

    Raises:
        PreflightError: there is no such tool.
    """
    if host.path(_UPDATE).exists():
        return (_UPDATE,)
    for tool in _MKCONFIG:
        if host.path(tool).exists():
            return (tool, "-o", path)
    raise PreflightError(
        f"{path} is there, and neither update-grub nor grub-mkconfig",
        code="boot-menu-tool-missing",
        hint="apt-get install grub-common",
    )


def update_boot_menu(path: str, host: Host) -> None:
    """Run the tool with the host's own configuration; in a tree by chroot, as for an initramfs.

    Raises:
        VerifyError: it failed.
    """
    run_own_tool(
        host,
        path,
        menu_command(path, host),
        timeout=_TOOL_SECONDS,
        code="boot-menu-failed",
        failed="could not be written anew",
    )
