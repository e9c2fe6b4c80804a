"""What the driver grants: P2P read and write over every ordered pair of cards.

NVML in a child with a deadline, and ``nvidia-smi``: for ``status`` where NVML does not answer,
for ``verify`` besides. A grant is not a proof that data arrives (CASES A); that is
``verify --deep``'s work.
"""

from __future__ import annotations

from gpuguard.core.expectation import normal_bus_id
from gpuguard.core.facts import P2pFacts
from gpuguard.core.p2p_merge import merged
from gpuguard.core.p2p_reasons import FAILED, NO_DRIVER, OUTSTANDING, TIMEOUT
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text, real_path
from gpuguard.probes.guard import OutstandingError, guarded
from gpuguard.probes.nvidia_smi import ask_nvidia_smi
from gpuguard.probes.nvml import ask_nvml

__all__ = [
    "normal_bus_id", "probe_answers", "probe_bound_drivers", "probe_p2p", "probe_pci_gpus",
]  # fmt: skip

_LOADED = "/proc/driver/nvidia/version"
_DEADLINE = 10.0
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA, and 3D controllers: data-centre cards
_TOP = "/sys/bus/pci/devices"


def probe_pci_gpus(host: Host) -> tuple[str, ...]:
    """PCI addresses of every NVIDIA display device: how many cards there should be.

    Raises:
        ProbeError: sysfs is there but cannot be read.
    """
    return tuple(
        device
        for device in list_dir(host, _TOP)
        if (read_text(host, f"{_TOP}/{device}/vendor") or "").strip() == _NVIDIA
        and (read_text(host, f"{_TOP}/{device}/class") or "").startswith(_DISPLAY_CLASSES)
    )


def probe_bound_drivers(host: Host) -> dict[str, str | None]:
    """PCI address of every NVIDIA display device -> kernel driver that holds it; None: none does.

    Raises:
        ProbeError: sysfs is there but cannot be read.
    """
    links = {device: real_path(host, f"{_TOP}/{device}/driver") for device in probe_pci_gpus(host)}
    return {device: link.name if link else None for device, link in links.items()}


def probe_p2p(host: Host) -> P2pFacts:
    """Ask NVML, else nvidia-smi; ``problem`` says what is missing from the answer."""
    if (nobody := _not_to_be_asked(host)) is not None:
        return nobody
    try:
        with guarded(host, wait=_DEADLINE) as guard:
            facts = ask_nvml(host, guard, _DEADLINE)
            # after a time-out nvidia-smi would most likely hang in the same place
            if facts.source is not None or facts.reason in (TIMEOUT, OUTSTANDING):
                return facts
            other = ask_nvidia_smi(host, guard, _DEADLINE)
    except OutstandingError as error:
        return P2pFacts(problem=error.message, reason=OUTSTANDING)
    return other if other.source is not None else merged({"NVML": facts, "nvidia-smi": other})


def probe_answers(host: Host, timeout: float) -> dict[str, P2pFacts]:
    """Ask both, one after the other; ``nvml`` and ``nvidia-smi`` -> what it said.

    A source that hangs costs ``timeout`` seconds; if its process cannot be killed the other
    one is not asked any more.
    """
    if (nobody := _not_to_be_asked(host)) is not None:
        return {"nvml": nobody, "nvidia-smi": nobody}
    try:
        with guarded(host, wait=timeout) as guard:
            return {
                "nvml": ask_nvml(host, guard, timeout),
                "nvidia-smi": ask_nvidia_smi(host, guard, timeout),
            }
    except OutstandingError as error:
        nobody = P2pFacts(problem=error.message, reason=OUTSTANDING)
        return {"nvml": nobody, "nvidia-smi": nobody}


def _not_to_be_asked(host: Host) -> P2pFacts | None:
    try:
        if read_text(host, _LOADED) is None:
            return P2pFacts(problem="no NVIDIA driver is loaded", reason=NO_DRIVER)
    except ProbeError as error:
        return P2pFacts(problem=error.message, reason=FAILED)
    return None
