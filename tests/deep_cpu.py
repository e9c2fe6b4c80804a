"""The deep check's kernels as a library for the CPU: thread after thread, same source."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from gpuguard.deep import kernels

_SHIM = """
#include <string.h>
#define __device__ static
#define __global__
#define __forceinline__ inline
typedef struct { unsigned x; } dim3_;
typedef struct { unsigned x, y, z, w; } uint4;
static dim3_ blockIdx, threadIdx, blockDim, gridDim;
static void atomicAdd(unsigned long long *at, unsigned long long by) { *at += by; }
static void atomicMin(unsigned long long *at, unsigned long long by) { if (by < *at) *at = by; }
"""
_RUN = """
void run_%(name)s(unsigned blocks, unsigned threads, unsigned long long *a) {
    blockDim.x = threads; gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) %(name)s(%(arguments)s);
}
"""
TYPES = {
    "fill": ["u8 *", "u64", "u64"],
    "spread": ["u8 *", "u64", "u64"],
    "copy": ["u8 *", "const u8 *", "u64"],
    "compare": ["const u8 *", "u64", "u64", "u64 *"],
    "peek": ["const u8 *", "u64", "u64 *"],
    "compare_sum": ["const u8 *", "u64", "u64", "u64", "u64", "u64 *"],
    "link_chain": ["u8 *", "u64", "u64"],
    "follow_chain": ["const u8 *", "u64", "u64", "u64 *"],
}


class Kernels:
    """Runs kernels, thread after thread; every argument is a word of 64 bits."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def run(self, name: str, *arguments: int, grid: tuple[int, int] = (3, 32)) -> None:
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        self._library[f"run_{name}"](*grid, values)


def build(folder: Path) -> Path:
    """Compile the kernels into a library there; needs gcc."""
    runs = [
        _RUN
        % {
            "name": name,
            "arguments": ", ".join(f"({kind})a[{n}]" for n, kind in enumerate(types)),
        }
        for name, types in TYPES.items()
    ]
    source = _SHIM + kernels.SOURCE.replace('extern "C" ', "") + "".join(runs)
    (folder / "kernels.c").write_text(source)
    library = folder / "kernels.so"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-w", "-o", library, folder / "kernels.c"], check=True
    )
    return library
