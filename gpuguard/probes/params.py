"""Live options of the nvidia module, and what the driver tells of each card in /proc."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuguard.core.doctor_facts import Unread
from gpuguard.errors import CommandError, ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text
from gpuguard.probes.guard import Guard, OutstandingError, guarded

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
        addresses = list_dir(host, GPUS)
        if not host.is_live or not addresses:
            return {address: _of_tree(host, address) for address in addresses}
        # The driver asks the card for it and may wait for ever: only a child may hang.
        with guarded(host, wait=_DEADLINE) as guard:
            return {address: _ask(guard, address) for address in addresses}
    except OutstandingError:
        return dict.fromkeys(addresses, _UNTOLD)
    except ProbeError:
        return {}


_UNTOLD = CardInformation(None, None, excluded=False)


def _of_tree(host: Host, address: str) -> CardInformation:
    return parse_information(read_text(host, f"{GPUS}/{address}/information") or "")


def _ask(guard: Guard, address: str) -> CardInformation:
    try:
        done = guard.run("cat", f"{GPUS}/{address}/information", timeout=_DEADLINE)
    except (CommandError, ProbeError):
        return _UNTOLD
    return parse_information(done.stdout)
