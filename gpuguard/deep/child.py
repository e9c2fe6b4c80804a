"""``python -m gpuguard.deep.child REQUEST``: the process that touches CUDA and NVML.

The request is one JSON object; each line printed is one JSON object with a ``kind`` and, where
it is about a pair, ``pair`` (UUIDs). A ``step`` line comes before anything that may hang, so
that the parent knows what hung. Other lines (NCCL's log, a traceback) are not of the protocol.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from gpuguard.core.deep_facts import Span
from gpuguard.deep.pairs import run_pairs
from gpuguard.deep.port import Cuda, CudaError


def emit(kind: str, **values: Any) -> None:
    """Print one line in one write, so that no other thread's output can split it.

    It begins with a line break: NCCL's log leaves half lines behind, wherever its buffer ends.
    """
    os.write(1, b"\n" + json.dumps({"kind": kind, **values}).encode() + b"\n")


def main() -> None:
    """Do what the request says; the exit status says nothing."""
    request = json.loads(sys.argv[1])
    if request["mode"] == "look":
        _look()
        emit("end")
    elif request["mode"] == "tools":
        emit("tools", problem=_missing())
    elif request["mode"] == "collective":
        from gpuguard.deep.collective import run_collective

        run_collective(request["cards"], request["length"], emit)
        emit("end")
    else:
        emit("step", name="start", engine=None)
        if (cuda := _start()) is not None:
            answer(cuda, request)


def answer(cuda: Cuda, request: dict[str, Any]) -> None:
    """Work on the request's pairs."""
    run_pairs(
        cuda,
        wanted=request["pairs"],
        only=request["only"],
        spans=[Span(**span) for span in request["spans"]],
        emit=emit,
    )


def _start() -> Cuda | None:
    try:
        from gpuguard.deep.cuda_driver import DriverCuda

        return DriverCuda()
    except ImportError as error:
        emit("unavailable", installed=False, problem=f"{error}")
    except (CudaError, RuntimeError, OSError) as error:
        # RuntimeError: what the bindings raise where there is no libcuda.so.1
        emit("unavailable", installed=True, problem=f"CUDA cannot be used: {error}")
    return None


def _missing() -> str | None:
    """What a deep check needs and this environment does not have; no card is touched."""
    from gpuguard.deep import nccl

    try:
        importlib.import_module("cuda.bindings.driver")
        importlib.import_module("cuda.bindings.nvrtc")
        nccl.load()
    except (ImportError, RuntimeError, OSError, nccl.NcclMissingError) as error:
        return f"{error}"
    return None


def _look() -> None:
    emit("step", name="look", engine=None)
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        emit("look", problem=f"{error}")
        return
    from gpuguard.deep.look import look

    look(nvml, emit)


if __name__ == "__main__":
    main()
