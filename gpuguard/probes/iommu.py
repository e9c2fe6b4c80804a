"""IOMMU groups and their types.

The type decides, not the kernel's command line (CASES C03): ``DMA`` and ``DMA-FQ`` translate,
``identity`` passes through. Source: Linux, Documentation/ABI/testing/sysfs-kernel-iommu_groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuguard.core.doctor_facts import Unread
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text, real_path

GROUPS = "/sys/kernel/iommu_groups"


@dataclass(frozen=True, slots=True)
class IommuGroups:
    """PCI address -> group, group -> type; ``unread`` stands for the whole folder."""

    group_of: dict[str, str]
    types: dict[str, str | Unread]
    unread: Unread | None = None

    def of(self, address: str) -> tuple[str | None, str | Unread | None]:
        """(group, type) of a device; (None, None) if it is in no group."""
        if self.unread is not None:
            return None, self.unread
        group = self.group_of.get(address)
        return group, None if group is None else self.types[group]


def probe_iommu(host: Host) -> IommuGroups:
    """Every group of the host; none at all if no IOMMU is on."""
    try:
        if real_path(host, "/sys/kernel") is None:
            return IommuGroups({}, {}, Unread(GROUPS, "there is no /sys/kernel here"))
        groups = list_dir(host, GROUPS)
        members = {
            device: group
            for group in groups
            for device in list_dir(host, f"{GROUPS}/{group}/devices")
        }
    except ProbeError as error:
        return IommuGroups({}, {}, Unread(GROUPS, error.message))
    return IommuGroups(members, {group: _type(host, group) for group in groups})


def _type(host: Host, group: str) -> str | Unread:
    path = f"{GROUPS}/{group}/type"
    try:
        text = read_text(host, path)
    except ProbeError as error:
        return Unread(path, error.message)
    return Unread(path, "there is no such file") if text is None else text.strip()
