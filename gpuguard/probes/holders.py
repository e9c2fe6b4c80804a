"""Loaded modules of the driver, and who holds the cards.

psutil's ``open_files`` lists regular files only, so the descriptors are read from /proc.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from gpuguard.core.facts import MODULE_NAMES
from gpuguard.core.reload import Holder, LoadedModule
from gpuguard.errors import ProbeError
from gpuguard.host.elf import parse_build_id_note
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_bytes, read_text, real_path
from gpuguard.probes.p2p import probe_pci_gpus

_MODULES = "/sys/module"
_DEVICES = "/sys/bus/pci/devices"
_DEVICE = re.compile(r"/dev/nvidia(?:\d+|ctl|-.*)?(?:/.*)?")
_DISABLED = "/proc/sys/kernel/modules_disabled"


def sysfs_name(module: str) -> str:
    """``nvidia_drm`` for ``nvidia-drm``: what the kernel itself calls it."""
    return module.replace("-", "_")


def probe_loaded(host: Host) -> tuple[LoadedModule, ...]:
    """The driver's modules in the running kernel, in the order of ``MODULE_NAMES``.

    Raises:
        ProbeError: ``/sys/module`` cannot be read.
    """
    found = (_loaded(host, name) for name in MODULE_NAMES)
    return tuple(module for module in found if module is not None)


def _loaded(host: Host, name: str) -> LoadedModule | None:
    folder = f"{_MODULES}/{sysfs_name(name)}"
    if real_path(host, folder) is None:
        return None
    note = read_bytes(host, f"{folder}/notes/.note.gnu.build-id")
    references = (read_text(host, f"{folder}/refcnt") or "").strip()
    return LoadedModule(
        name=name,
        build_id=parse_build_id_note(note) if note else None,
        references=int(references) if references.lstrip("-").isdecimal() else None,
        users=tuple(_canonical(user) for user in list_dir(host, f"{folder}/holders")),
    )


def _canonical(user: str) -> str:
    name = user.replace("_", "-")
    return name if name in MODULE_NAMES else user


def modules_disabled(host: Host) -> bool:
    """True if nothing can be loaded until the next boot (sysctl ``kernel.modules_disabled``)."""
    try:
        return (read_text(host, _DISABLED) or "").strip() == "1"
    except ProbeError:
        return False


def probe_holders(host: Host, nvml: Iterable[int] = ()) -> tuple[Holder, ...]:
    """Processes with a device of the cards open, by pid; other users' only as root.

    Args:
        host: where to look.
        nvml: processes that NVML knows; it also sees those of other namespaces.
    """
    drm = _drm_nodes(host)
    found = {}
    for pid in _pids(host):
        devices = sorted({d for d in _open(host, pid) if _DEVICE.fullmatch(d) or d in drm})
        if devices and pid != os.getpid():
            found[pid] = _holder(host, pid, tuple(devices))
    for pid in nvml:
        found.setdefault(pid, _holder(host, pid, ("(as NVML says)",)))
    return tuple(found[pid] for pid in sorted(found))


def _holder(host: Host, pid: int, devices: tuple[str, ...]) -> Holder:
    return Holder(pid=pid, name=_name(host, pid), devices=devices, unit=_unit(host, pid))


def _drm_nodes(host: Host) -> frozenset[str]:
    """``/dev/dri/card1``, ``/dev/dri/renderD128``: the cards' display devices."""
    try:
        return frozenset(
            f"/dev/dri/{node}"
            for card in probe_pci_gpus(host)
            for node in list_dir(host, f"{_DEVICES}/{card}/drm")
        )
    except ProbeError:
        return frozenset()


def _pids(host: Host) -> Iterator[int]:
    with suppress(ProbeError):
        yield from (int(name) for name in list_dir(host, "/proc") if name.isdecimal())


def _open(host: Host, pid: int) -> Iterator[str]:
    """Where its descriptors lead. Links only: other files of a stuck process may hang."""
    folder: Path = host.path(f"/proc/{pid}/fd", follow=False)
    with suppress(OSError):  # it ended, or is another user's
        for descriptor in folder.iterdir():
            with suppress(OSError):
                yield os.readlink(descriptor)  # noqa: PTH115 - "pipe:[7]" is no path


def _name(host: Host, pid: int) -> str:
    with suppress(ProbeError):
        return (read_text(host, f"/proc/{pid}/comm") or "").strip() or "?"
    return "?"


def _unit(host: Host, pid: int) -> str:
    """``vllm.service`` of ``0::/system.slice/vllm.service``; empty if it is in no unit."""
    with suppress(ProbeError):
        text = read_text(host, f"/proc/{pid}/cgroup") or ""
        for part in reversed(text.strip().rpartition("\n")[2].split("/")):
            if part.endswith((".service", ".scope")):
                return part
    return ""
