"""NVIDIA cards as sysfs shows them: driver, place in the tree, BAR1, link, display.

Nothing here asks the driver, so a card that it has lost is still seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpuguard.core.doctor_facts import Bridge, CardFacts, Link, NvmlCard, Unread
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text, real_path
from gpuguard.probes.acs import read_acs
from gpuguard.probes.iommu import IommuGroups
from gpuguard.probes.p2p import probe_pci_gpus
from gpuguard.probes.params import CardInformation

DEVICES = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s")
_MAX_WIDTH = 32  # 63 or 255: the register read as ones
# include/linux/ioport.h
_IO_MEMORY = 0x200
_IO_UNSET = 0x20000000  # sized, but neither firmware nor kernel found it a place
_BARS = 6


def probe_cards(
    host: Host,
    groups: IommuGroups,
    information: dict[str, CardInformation],
    nvml: dict[str, NvmlCard],
    granted: Iterable[str] = (),
) -> tuple[CardFacts, ...] | Unread:
    """Every NVIDIA display device; also one that only the driver names.

    Args:
        host: where to look.
        groups: IOMMU groups.
        information: by address, from the driver's /proc folder.
        nvml: by address, from NVML.
        granted: addresses of the P2P matrix.
    """
    known = {*information, *nvml, *filter(None, granted)}
    try:
        if real_path(host, DEVICES) is None and not known:
            return Unread(DEVICES, "there is no such folder (a container, or a disk at rest)")
        on_bus = set(probe_pci_gpus(host))
    except ProbeError as error:
        return Unread(DEVICES, error.message)
    addresses = sorted(on_bus | known)
    return tuple(
        _card(host, address, groups, information.get(address), nvml.get(address))
        for address in addresses
    )


def parse_link(speed: str, width: str, max_speed: str, max_width: str) -> Link:
    """A link from sysfs: ``16.0 GT/s PCIe``, ``16``; ``Unknown``, 0, 63 and 255 are None."""
    return Link(
        speed=_parse_speed(speed),
        width=_parse_width(width),
        max_speed=_parse_speed(max_speed),
        max_width=_parse_width(max_width),
    )


def parse_bar1(resource: str) -> tuple[int, int]:
    """(line number, bytes) of BAR1 in sysfs's ``resource`` file.

    What NVIDIA calls BAR1 is the second memory BAR, wherever it lies: a 64-bit BAR takes two
    lines, and BAR0 is a 32-bit one on GeForce cards (line 1) and a 64-bit one on H200 (line 2).

    0 bytes: there is none, or it has no address (firmware and kernel found it no place).
    """
    memory = []
    for number, line in enumerate(resource.splitlines()[:_BARS]):
        words = line.split()
        if len(words) == 3:  # noqa: PLR2004 - first byte, last byte, flags
            start, end, flags = (int(word, 16) for word in words)
            if flags & _IO_MEMORY:
                memory.append((number, end - start + 1, flags))
    if len(memory) < 2:  # noqa: PLR2004
        return 1, 0
    number, size, flags = memory[1]
    return number, 0 if flags & _IO_UNSET else size


def parse_resize(text: str) -> int | None:
    """Largest size in bytes of ``resourceN_resize``: bit n stands for 2^n MiB, in hex."""
    try:
        mask = int(text.strip(), 16)
    except ValueError:
        return None
    return (1 << 20) << (mask.bit_length() - 1) if mask > 0 else None


def _card(
    host: Host,
    address: str,
    groups: IommuGroups,
    information: CardInformation | None,
    nvml: NvmlCard | None,
) -> CardFacts:
    top = f"{DEVICES}/{address}"
    root, above = _place(host, address)
    bar1, possible = _bar1(host, top)
    group, group_type = groups.of(address)
    return CardFacts(
        bus_id=address,
        driver=_driver(host, top),
        root=root,
        bridges=above,
        numa_node=_integer(_attribute(host, f"{top}/numa_node")),
        iommu_group=group,
        iommu_type=group_type,
        bar1_bytes=bar1,
        bar1_possible=possible,
        boot_vga=_flag(_attribute(host, f"{top}/boot_vga")),
        connected=tuple(_connected(host, top)),
        link=_link(host, top),
        minor=information.minor if information else None,
        firmware=information.firmware if information else None,
        excluded_by_driver=information is not None and information.excluded,
        nvml=nvml,
    )


def _place(host: Host, address: str) -> tuple[str, tuple[Bridge, ...]]:
    """Host bridge, and the ports from it down to the card, by where the device link leads."""
    try:
        real = real_path(host, f"{DEVICES}/{address}")
    except ProbeError:
        real = None
    if real is None:
        return "", ()
    parts = Path(host.inside(real)).parts
    root = next((part for part in parts if _HOST_BRIDGE.fullmatch(part)), "")
    found = []
    for depth, part in enumerate(parts[:-1]):
        if _ADDRESS.fullmatch(part):
            folder = str(Path(*parts[: depth + 1]))
            found.append(
                Bridge(
                    address=part,
                    acs=read_acs(host, f"{folder}/config"),
                    link=_link(host, folder),
                )
            )
    return root, tuple(found)


def _driver(host: Host, top: str) -> str | Unread | None:
    try:
        if real_path(host, top) is None:
            return Unread(f"{top}/driver", "sysfs does not show this card")
        link = host.path(f"{top}/driver", follow=False)
        return link.readlink().name if link.is_symlink() else None
    except (ProbeError, OSError) as error:
        return Unread(f"{top}/driver", str(error))


def _bar1(host: Host, top: str) -> tuple[int | Unread | None, int | None]:
    path = f"{top}/resource"
    try:
        text = read_text(host, path)
        if text is None:
            return Unread(path, "there is no such file"), None
        number, size = parse_bar1(text)
    except (ProbeError, ValueError) as error:
        return Unread(path, str(error)), None
    return size, parse_resize(_attribute(host, f"{top}/resource{number}_resize"))


def _connected(host: Host, top: str) -> Iterator[str]:
    """Connectors with a screen: ``drm/card1/card1-HDMI-A-1/status``; needs nvidia-drm."""
    try:
        for card in list_dir(host, f"{top}/drm"):
            for connector in list_dir(host, f"{top}/drm/{card}"):
                status = _attribute(host, f"{top}/drm/{card}/{connector}/status")
                if status == "connected":
                    yield connector
    except ProbeError:
        return


def _link(host: Host, folder: str) -> Link:
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    return parse_link(*(_attribute(host, f"{folder}/{name}") for name in names))


def _attribute(host: Host, path: str) -> str:
    """Content of a small file; empty if it is not there or does not answer (a lost card)."""
    try:
        return (read_text(host, path) or "").strip()
    except ProbeError:
        return ""


def _parse_speed(text: str) -> float | None:
    match = _SPEED.match(text)
    return float(match[1]) if match else None


def _parse_width(text: str) -> int | None:
    width = _integer(text)
    return width if width is not None and 0 < width <= _MAX_WIDTH else None


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _flag(text: str) -> bool | None:
    return {"0": False, "1": True}.get(text)
