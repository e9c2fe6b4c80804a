"""Live options of the nvidia module, and what the driver tells of each card in /proc."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuguard.core.doctor_facts import Unread
from gpuguard.errors import CommandError, ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text

PARAMS = "/proc/driver/nvidia/params"
GPUS = "/proc/driver/nvidia/gpus"
_DEADLINE = 5.0
_LINE = re.compile(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CardInformation:
    """From ``gpus/<address>/information``; ``firmware`` None where no GSP runs (``N/A``)."""

    minor: int | None
    firmware: str | None
    excluded: bool


def probe_params(host: Host) -> tuple[tuple[str, str], ...] | Unread | None:
    """Name and value of every live option; None if no driver is loaded."""
    try:
        text = read_text(host, PARAMS)
    except ProbeError as error:
        return Unread(PARAMS, error.message)
    return None if text is None else tuple(parse_params(text).items())


def parse_params(text: str) -> dict[str, str]:
    """``name: value`` lines; strings lose their quotation marks (driver 580)."""
    return {name: value.strip('"') for name, value in _LINE.findall(text)}


def parse_information(text: str) -> CardInformation:
    """``Device Minor``, ``GPU Firmware`` and ``GPU Excluded`` of a card (nv-procfs.c)."""
    fields = dict(_LINE.findall(text))
    minor = fields.get("Device Minor", "")
    firmware = fields.get("GPU Firmware", "N/A")
    return CardInformation(
        minor=int(minor) if minor.isdecimal() else None,
        firmware=None if firmware in ("N/A", "") else firmware,
        excluded=fields.get("GPU Excluded") == "Yes",
    )


def probe_information(host: Host) -> dict[str, CardInformation]:
    """PCI address -> what the driver tells; empty without a driver."""
    try:
        return {address: _information(host, address) for address in list_dir(host, GPUS)}
    except ProbeError:
        return {}


def _information(host: Host, address: str) -> CardInformation:
    path = f"{GPUS}/{address}/information"
    try:
        if not host.is_live:
            return parse_information(read_text(host, path) or "")
        # The driver asks the card for it and may wait for ever: only a child may hang.
        return parse_information(host.run("cat", path, timeout=_DEADLINE).stdout)
    except (CommandError, ProbeError):
        return CardInformation(None, None, excluded=False)
