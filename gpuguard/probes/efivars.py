"""EFI variables as efivarfs shows them: four bytes of attributes, then the value."""

from __future__ import annotations

from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_bytes

EFIVARS_DIR = "/sys/firmware/efi/efivars"
LOADER_GUID = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"  # systemd's Boot Loader Interface
_ATTRIBUTES = 4


def read_efivar(host: Host, name: str) -> bytes | None:
    """The value of ``Name-guid``; None if there is no such variable.

    Raises:
        ProbeError: it is there but cannot be read, or is too short to be one.
    """
    content = read_bytes(host, f"{EFIVARS_DIR}/{name}", max_bytes=1 << 20)
    if content is None:
        return None
    if len(content) < _ATTRIBUTES:
        raise ProbeError(f"EFI variable {name} has {len(content)} bytes, at least 4 expected")
    return content[_ATTRIBUTES:]


def read_loader_variable(host: Host, name: str) -> str:
    """A string that the boot loader left or will read; empty if it is not set."""
    value = read_efivar(host, f"{name}-{LOADER_GUID}") or b""
    return value.decode("utf-16-le", "replace").rstrip("\0")


def efivar_names(host: Host) -> tuple[str, ...]:
    """Names of all variables; empty if the host was not booted by EFI."""
    return list_dir(host, EFIVARS_DIR)
