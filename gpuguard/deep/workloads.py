"""Who computes on the cards: NVML's list, and who holds ``/dev/nvidia-uvm``.

CUDA opens the unified memory device in every process; display servers and NVIDIA's
persistence daemon hold other device files and are no reason not to look. psutil's
``open_files`` lists regular files only, so the descriptors are read from /proc.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpuguard.core.deep_facts import Workload
from gpuguard.host.port import Host

_UVM = "/dev/nvidia-uvm"
_NO_WORK = frozenset({"nvidia-persiste", "nvidia-persistenced"})  # /proc/*/comm has 15 characters


def find_workloads(host: Host, nvml_processes: Mapping[int, Sequence[str]]) -> list[Workload]:
    """Compute processes, other than this one; by pid."""
    mine = os.getpid()
    found = {
        pid: Workload(pid=pid, name=process_name(host, pid), source="nvml")
        for pid in nvml_processes
        if pid != mine
    }
    for pid in _holders(host):
        name = process_name(host, pid)
        if pid not in found and pid != mine and name not in _NO_WORK:
            found[pid] = Workload(pid=pid, name=name, source=_UVM)
    return [found[pid] for pid in sorted(found)]


def process_name(host: Host, pid: int) -> str:
    """Its name for people, ``?`` if it cannot be seen (another namespace)."""
    with suppress(OSError):
        return host.path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    return "?"


def _holders(host: Host) -> Iterator[int]:
    proc = host.path("/proc")
    for folder in sorted(proc.glob("[0-9]*")):
        if any(_leads_to_uvm(link) for link in _descriptors(folder)):
            yield int(folder.name)


def _descriptors(folder: Path) -> list[Path]:
    try:
        return list((folder / "fd").iterdir())
    except OSError:  # it ended, or belongs to another user: NVML lists that one
        return []


def _leads_to_uvm(link: Path) -> bool:
    with suppress(OSError):
        return str(link.readlink()) == _UVM
    return False
