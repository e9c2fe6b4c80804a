"""Bandwidth of ``verify --deep`` against ``torch``'s ``Tensor.copy_`` between the same cards.

``python -m benchmarks.p2p_bandwidth``: needs cards and torch. With one card both copy between
two buffers on it. Prints one row for each pair and size, and exits with 1 if gpuguard's copy
engine reaches less than 0.95 of torch's rate.
"""

from __future__ import annotations

import importlib
import sys
from itertools import permutations
from statistics import median
from typing import Any

from gpuguard.core.deep_facts import Engine
from gpuguard.deep.course import DeepRequest
from gpuguard.host import LocalHost
from gpuguard.verbs.deep import deep_verify

SIZES = (64 << 20, 256 << 20, 1 << 30)
TARGET = 0.95
_ROUNDS = 7


def torch_rate(torch: Any, src: int, dst: int, size: int) -> float:
    """Bytes per second of queued ``copy_`` calls, by events on the source card; the median."""
    source = torch.empty(size, dtype=torch.uint8, device=f"cuda:{src}").fill_(7)
    target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{dst}")
    queued = max(1, min(64, (16 << 30) // size))
    seconds: list[float] = []
    with torch.cuda.device(src):
        for _ in range(_ROUNDS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(src)
            torch.cuda.synchronize(dst)
            begin.record()
            for _ in range(queued):
                target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
    return size * queued / median(seconds[1:])


def main() -> None:
    """Measure both, print, judge."""
    torch = importlib.import_module("torch")
    count = torch.cuda.device_count()
    pairs = list(permutations(range(count), 2)) if count > 1 else [(0, 0)]
    worst = 1e9
    for size in SIZES:
        outcome = deep_verify(LocalHost(), DeepRequest(size_bytes=size, collective=False))
        index = {card.uuid: card.index for card in outcome.facts.cards}
        judged = {(index[p.pair.src], index[p.pair.dst]): p.pair for p in outcome.judgement.pairs}
        for pair in pairs:
            rates = {rate.engine: rate.bytes_per_second for rate in judged[pair].rates}
            theirs = torch_rate(torch, *pair, size)
            best = max(
                rates[Engine.COPY_PUSH], rates[Engine.COPY_PEER]
            )  # what copy_ calls, same direction
            worst = min(worst, best / theirs)
            ours = ", ".join(f"{engine} {rate / 1e9:.1f}" for engine, rate in rates.items())
            print(
                f"{pair[0]} -> {pair[1]}, {size >> 20} MiB: {ours}; torch {theirs / 1e9:.1f} GB/s; "
                f"ratio {best / theirs:.3f}"
            )
    print(f"worst ratio {worst:.3f}, target {TARGET}")
    sys.exit(worst < TARGET)


if __name__ == "__main__":
    main()
