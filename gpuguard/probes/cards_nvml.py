"""What NVML adds to the cards that sysfs shows: memory, display, load, NVLink, processes."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gpuguard.core.doctor_facts import NvmlCard
from gpuguard.errors import CommandError, ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import read_text
from gpuguard.probes.guard import guarded
from gpuguard.probes.nvidia_smi import library_path
from gpuguard.probes.p2p import normal_bus_id

_LOADED = "/proc/driver/nvidia/version"
_DEADLINE = 10.0


def probe_nvml_cards(host: Host) -> tuple[dict[str, NvmlCard], str | None]:
    """PCI address -> what NVML says, and what is missing from the answer."""
    try:
        if read_text(host, _LOADED) is None:
            return {}, "no NVIDIA driver is loaded"
        env = _environment(host)
        if not host.is_live and not env["LD_LIBRARY_PATH"]:
            return {}, "there is no libnvidia-ml.so.1 below this root"
        with guarded(host, wait=_DEADLINE) as guard:
            done = guard.run(
                sys.executable, "-P", "-m", "gpuguard.probes.cards_child",
                timeout=_DEADLINE, env=env,
            )  # fmt: skip
        return _decode(json.loads(done.stdout))
    except (CommandError, ProbeError) as error:
        return {}, error.message
    except (ValueError, KeyError, TypeError) as error:
        return {}, f"the NVML child answered nonsense: {error}"


def _decode(answer: dict[str, Any]) -> tuple[dict[str, NvmlCard], str | None]:
    cards = {}
    for card in answer["cards"]:
        address = normal_bus_id(card["bus_id"])
        known = {
            **card,
            "bus_id": address,
            "nvlink_peers": tuple(normal_bus_id(peer) for peer in card["nvlink_peers"]),
            "processes": tuple(card["processes"]),
            "process_bytes": tuple((pid, used) for pid, used in card["process_bytes"]),
        }
        cards[address] = NvmlCard(**known)
    return cards, answer["problem"] or (None if cards else "NVML reports no cards")


def _environment(host: Host) -> dict[str, str]:
    # As for the P2P question: nothing is imported from the working directory, and the
    # library is that of the root.
    env = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if not host.is_live:
        env["LD_LIBRARY_PATH"] = os.pathsep.join(library_path(host))
    return env
