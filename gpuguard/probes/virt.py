"""Is this a virtual machine or a container, and what does the kernel lock down."""

from __future__ import annotations

import re

from gpuguard.core.doctor_facts import Unread, VirtFacts
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import read_text, real_path

_DMI = "/sys/class/dmi/id"
_LOCKDOWN = "/sys/kernel/security/lockdown"
_FLAGS = re.compile(r"^flags\s*:(.*)$", re.MULTILINE)
_VENDOR = re.compile(r"^vendor_id\s*:\s*(\S+)", re.MULTILINE)
_CHOSEN = re.compile(r"\[(\w+)\]")  # none [integrity] confidentiality


def probe_virt(host: Host) -> VirtFacts:
    """What DMI, the CPU and the container's own marks say; all None if nothing does."""
    cpu = _text(host, "/proc/cpuinfo") or ""
    flags, vendor = _FLAGS.search(cpu), _VENDOR.search(cpu)
    return VirtFacts(
        vendor=_text(host, f"{_DMI}/sys_vendor"),
        product=_text(host, f"{_DMI}/product_name"),
        hypervisor="hypervisor" in flags[1].split() if flags else None,
        container=_container(host),
        cpu_vendor=vendor[1] if vendor else None,
    )


def probe_lockdown(host: Host) -> str | Unread | None:
    """``none``, ``integrity``, ``confidentiality``; None if this kernel has no lockdown."""
    try:
        text = read_text(host, _LOCKDOWN)
    except ProbeError as error:
        return Unread(_LOCKDOWN, error.message)
    if text is None:
        return None
    match = _CHOSEN.search(text)
    return match[1] if match else Unread(_LOCKDOWN, f"it says {text.strip()!r}")


def _container(host: Host) -> str | None:
    # https://systemd.io/CONTAINER_INTERFACE; Docker and Podman leave a file of their own
    if name := _text(host, "/run/systemd/container"):
        return name
    for path, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        try:
            if real_path(host, path) is not None:
                return name
        except ProbeError:
            continue
    return None


def _text(host: Host, path: str) -> str | None:
    try:
        return (read_text(host, path) or "").strip() or None
    except ProbeError:
        return None
