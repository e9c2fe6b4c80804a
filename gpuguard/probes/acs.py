"""Access Control Services from PCI configuration space: do bridges redirect peer traffic.

Layout: PCI Express Base Specification, 7.6 and 7.7 (capability lists) and 7.7.11 (ACS).
An ordinary user reads the first 64 bytes only; that is "could not look", never "off".
"""

from __future__ import annotations

import struct

from gpuguard.core.doctor_facts import Unread
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import read_bytes

_CONVENTIONAL = 0x100  # bytes; the extended space follows, up to 4096
_ACS = 0x000D
_ACS_CONTROL = 6  # offset within the capability
_PCI_EXPRESS = 0x10
_HAS_CAPABILITIES = 0x10  # Status register
_MAX_STEPS = 480  # (4096 - 256) / 8: a longer list is a loop


def read_acs(host: Host, config: str) -> int | Unread | None:
    """ACS Control of the device whose ``config`` file this is; see ``parse_acs``."""
    try:
        content = read_bytes(host, config, max_bytes=4096)
    except ProbeError as error:
        return Unread(config, error.message.partition(": ")[2] or error.message)
    if content is None:
        return Unread(config, "there is no such file")
    try:
        return parse_acs(content)
    except ProbeError as error:
        return Unread(config, error.message)


def parse_acs(config: bytes) -> int | None:
    """The ACS Control register; None if the device has no ACS.

    Raises:
        ProbeError: the space is cut short, or the device does not answer (all ones).
    """
    if len(config) < _CONVENTIONAL:
        raise ProbeError(f"only {len(config)} bytes of configuration space may be read")
    if config[:4] == b"\xff\xff\xff\xff":
        raise ProbeError("the device does not answer (all ones)")
    if len(config) == _CONVENTIONAL:
        if _is_express(config):
            raise ProbeError("the extended configuration space is not there (no MMCONFIG)")
        return None  # conventional PCI knows no ACS
    offset = _CONVENTIONAL
    for _ in range(_MAX_STEPS):
        header = _dword(config, offset)
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == _ACS:
            return _word(config, offset + _ACS_CONTROL)
        offset = header >> 20
        if offset == 0:
            return None
        if offset < _CONVENTIONAL or offset % 4:
            raise ProbeError(f"its capability list is damaged (next: {offset:#x})")
    raise ProbeError("its capability list is a loop")


def _is_express(config: bytes) -> bool:
    if not _word(config, 0x06) & _HAS_CAPABILITIES:
        return False
    offset = config[0x34] & ~3
    for _ in range(48):  # (256 - 64) / 4
        if offset < 0x40:  # noqa: PLR2004 - below lies the standard header
            return False
        if config[offset] == _PCI_EXPRESS:
            return True
        offset = config[offset + 1] & ~3
    return False


def _word(config: bytes, offset: int) -> int:
    return int(_unpack("<H", config, offset))


def _dword(config: bytes, offset: int) -> int:
    return int(_unpack("<I", config, offset))


def _unpack(form: str, config: bytes, offset: int) -> int:
    try:
        return int(struct.unpack_from(form, config, offset)[0])
    except struct.error as error:
        raise ProbeError(f"configuration space ends at {len(config)} bytes") from error
