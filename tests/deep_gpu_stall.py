"""``python -m tests.deep_gpu_stall REQUEST``: the real child, with a kernel that never ends.

On the first pair the kernel that should store across the link follows a chain for hours.
"""

from __future__ import annotations

import json
import sys

from gpuguard.deep.child import answer, emit, main
from gpuguard.deep.cuda_driver import DriverCuda


class Stalling(DriverCuda):
    """See ``DriverCuda``; ``first`` is the pair that stalls."""

    def __init__(self) -> None:
        super().__init__()
        self._poisoned: set[int] = set()
        last = len(self.cards()) - 1
        self._stalls = (0, last)

    def spread(self, card: int, address: int, length: int, word: int) -> None:
        self._poisoned.add(address)
        super().spread(card, address, length, word)

    def fill(self, card: int, address: int, length: int, seed: int) -> None:
        src, dst = seed >> 50 & 63, seed >> 44 & 63  # deep_pattern.Tag
        if address in self._poisoned and (src, dst) == self._stalls:
            super().follow_chain(card, address, 0, 1 << 44)
        else:
            super().fill(card, address, length, seed)


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    if request["mode"] == "pairs":
        emit("step", name="start", engine=None)
        answer(Stalling(), request)
    else:
        main()
