"""NVML, asked by a child with a deadline: see ``nvml_child``."""

from __future__ import annotations

import json
import os
import sys
from itertools import permutations
from typing import Any

from gpuguard.core.expectation import normal_bus_id
from gpuguard.core.facts import Gpu, P2pFacts, P2pPair
from gpuguard.core.p2p_reasons import (
    BINDING_MISSING,
    CARD_UNREACHABLE,
    FAILED,
    LIBRARY_MISSING,
    NO_DEVICES,
    NO_DRIVER,
    OUTSTANDING,
    TIMEOUT,
    VERSION_MISMATCH,
)
from gpuguard.errors import CommandError, CommandTimeoutError, ProbeError
from gpuguard.host.port import Completed, Host
from gpuguard.probes.guard import Guard, OutstandingError
from gpuguard.probes.nvidia_smi import library_path

_CHILD = "from gpuguard.probes.nvml_child import main; main()"
_REASONS = {
    "ImportError": BINDING_MISSING,
    "ModuleNotFoundError": BINDING_MISSING,
    "NVMLError_LibraryNotFound": LIBRARY_MISSING,
    "NVMLError_DriverNotLoaded": NO_DRIVER,
    "NVMLError_LibRmVersionMismatch": VERSION_MISMATCH,
    "NVMLError_GpuIsLost": CARD_UNREACHABLE,
}


def ask_nvml(host: Host, guard: Guard, timeout: float) -> P2pFacts:
    """Cards and the status of every ordered pair."""
    # -P: never import from the working directory, which may be anyone's while we are root. -S:
    # the path is given, and looking through site-packages takes a third of the child's time.
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if not host.is_live:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(library_path(host))
    command = (sys.executable, "-P", "-S", "-c", _CHILD)
    try:
        return _facts(guard.run(*command, timeout=timeout, env=environment))
    except OutstandingError as error:
        return P2pFacts(problem=error.message, reason=OUTSTANDING)
    except CommandTimeoutError as error:
        problem = f"no result within {timeout:g} s"
        if error.left:
            problem += ", and the process cannot be killed (abandoned)"
        return P2pFacts(problem=problem, reason=OUTSTANDING if error.left else TIMEOUT)
    except (CommandError, ProbeError) as error:
        return P2pFacts(problem=error.message, reason=FAILED)


def _facts(done: Completed) -> P2pFacts:
    if done.exit_status != 0:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise ProbeError(f"the child exited with {done.exit_status}: {last}")
    try:
        answer = json.loads(done.stdout)
        gpus = tuple(_gpu(gpu) for gpu in answer["gpus"])
        pairs = tuple(P2pPair(**pair) for pair in answer["pairs"])
        lost = tuple((str(name), str(said)) for name, said in answer["lost"])
        problem, error = answer["problem"], answer["error"]
    except (ValueError, KeyError, TypeError) as failure:
        raise ProbeError(f"the child answered nonsense: {failure}") from failure
    if sorted((p.src, p.dst) for p in pairs) != sorted(permutations([g.uuid for g in gpus], 2)):
        raise ProbeError(f"{len(pairs)} pairs for {len(gpus)} cards")
    if not gpus:
        reason = _REASONS.get(error, FAILED) if error else NO_DEVICES
        if lost and not error:
            reason = CARD_UNREACHABLE
        return P2pFacts(problem=problem or "no cards", reason=reason, lost=lost)
    return P2pFacts(source="nvml", gpus=gpus, pairs=pairs, problem=problem, lost=lost)


def _gpu(answer: dict[str, Any]) -> Gpu:
    return Gpu(**{**answer, "pci_bus_id": normal_bus_id(answer["pci_bus_id"])})
