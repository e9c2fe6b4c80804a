"""Run the child with a deadline for each step; after a hang go on with a fresh one.

The whole group is killed when a step takes too long. A child that cannot be killed is left
alone and nothing more is started: one stuck process is enough.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuguard.deep.collect import Collector
from gpuguard.errors import CommandError, CommandTimeoutError
from gpuguard.host.port import Deadline
from gpuguard.probes.guard import Guard, OutstandingError

COMMAND = (sys.executable, "-P", "-m", "gpuguard.deep.child")  # -P: not from the working directory
_GRACE = 10.0  # after KILL the driver takes seconds to tear contexts and memory down


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds for each step: CUDA's start on a host with many cards takes ten and more.

    ``total``: for all steps together; None: as long as they take.
    """

    start: float = 90.0
    look: float = 15.0
    step: float = 30.0
    collective: float = 120.0
    total: float | None = None

    def of(self, step: str) -> float:
        """Seconds for a step by its name."""
        known = {"start": self.start, "look": self.look, "collective": self.collective}
        return known.get(step, self.step)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child ended; ``problem`` None: by itself."""

    problem: str | None = None
    hang: bool = False
    abandoned: bool = False


class Supervisor:
    """Starts children one after the other, and feeds what they say to a collector."""

    def __init__(
        self,
        guard: Guard,
        collector: Collector,
        deadlines: Deadlines,
        *,
        command: Sequence[str] = COMMAND,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._guard = guard
        self._collector = collector
        self._deadlines = deadlines
        self._command = tuple(command)
        self._progress = progress
        self._end = None if deadlines.total is None else Deadline(deadlines.total)
        self.abandoned: str | None = None  # why nothing more may be started

    def run(self, request: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Ending:
        """One child, from start to end; what it was at when it ended is marked."""
        if self.abandoned is not None:
            return Ending(self.abandoned)
        if self._left() <= 0:
            return Ending(self._too_long())
        deadline = Deadline(min(self._deadlines.start, self._left()))
        self._collector.begin()
        try:
            self._guard.run(
                *self._command, json.dumps(request), timeout=deadline, grace=_GRACE,
                env=environment() | dict(env or {}),
                on_line=lambda line: self._take(line, deadline),
            )  # fmt: skip
            ending = Ending(None if self._collector.ended else "the child ended early")
        except CommandTimeoutError as error:
            ending = self._hang(deadline, error)
        except (CommandError, OutstandingError) as error:
            ending = Ending(error.message)
        if ending.problem is not None:
            self._collector.close(ending.problem, hang=ending.hang)
        return ending

    def run_pairs(self, request: Mapping[str, Any]) -> Ending:
        """All pairs; each that breaks a child is left behind, and a fresh child goes on."""
        ending = self.run({**request, "mode": "pairs", "pairs": None})
        while todo := self._collector.todo():
            if self.abandoned is not None:
                break
            ending = self.run({**request, "mode": "pairs", "pairs": todo})
            if self._collector.todo() == todo:
                break  # not even the first of them was reached
        return ending

    def _take(self, line: str, deadline: Deadline) -> None:
        step = self._collector.take(line)
        if step is not None:
            deadline.give(min(self._deadlines.of(step), self._left()))
            if self._progress is not None:
                self._progress(self._collector.under_way)

    def _left(self) -> float:
        return float("inf") if self._end is None else self._end.left()

    def _too_long(self) -> str:
        return f"not through within {self._deadlines.total:g} s, the limit for all of it"

    def _hang(self, deadline: Deadline, error: CommandTimeoutError) -> Ending:
        problem = f"no answer within {deadline.seconds:g} s ({self._collector.under_way})"
        if self._left() <= 0 and not error.abandoned:  # slow or stuck: nobody can tell
            return Ending(f"{self._too_long()} ({self._collector.under_way})")
        if error.abandoned:
            problem += ", and the child cannot be killed (abandoned)"
            self.abandoned = f"not tried: {problem}"
        return Ending(problem, hang=True, abandoned=error.abandoned)


def environment() -> dict[str, str]:
    """What the child needs of ours: where modules and libraries are."""
    env = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML and nvidia-smi count
        "CUDA_CACHE_DISABLE": "1",  # HOME is / : leave nothing there
    }
    # Where the driver's libraries are found in containers.
    if path := os.environ.get("LD_LIBRARY_PATH"):
        env["LD_LIBRARY_PATH"] = path
    return env
