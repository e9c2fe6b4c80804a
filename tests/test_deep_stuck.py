"""A child that cannot be killed: nothing more is started, and what was not reached says why."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from gpuguard.core.deep_facts import Engine
from gpuguard.deep.collect import Collector
from gpuguard.deep.supervise import Supervisor
from gpuguard.errors import CommandTimeoutError
from gpuguard.host import Completed, Deadline, LocalHost
from gpuguard.probes.guard import Guard
from tests.deep_kit import QUICK

PAIRS = [("GPU-0", "GPU-1"), ("GPU-1", "GPU-0")]


class Stuck(Guard):
    """Runs nothing: each program says so much, and is then in uninterruptible sleep."""

    def __init__(self, root: Path) -> None:
        super().__init__(LocalHost(root), None, None)
        self.started = 0

    def run(
        self,
        *argv: str,
        timeout: float | Deadline,
        env: Mapping[str, str] = {},
        on_line: Callable[[str], None] | None = None,
        grace: float = 0,
    ) -> Completed:
        self.started += 1
        assert on_line is not None
        pair = {"pair": PAIRS[0]}
        on_line(json.dumps({"kind": "cards", "cards": [], "pairs": PAIRS}))
        on_line(json.dumps({"kind": "step", "name": "open", "engine": None, **pair}))
        on_line(json.dumps({"kind": "grant", "grant": True, **pair}))
        on_line(json.dumps({"kind": "step", "name": "check", "engine": "copy-push", **pair}))
        raise CommandTimeoutError("no result", abandoned=True)


def test_a_child_that_cannot_be_killed_is_never_doubled(tmp_path: Path) -> None:
    guard, collector = Stuck(tmp_path), Collector()
    supervisor = Supervisor(guard, collector, QUICK)
    ending = supervisor.run_pairs({"only": (), "spans": []})
    assert (ending.hang, ending.abandoned) == (True, True)
    assert "cannot be killed (abandoned)" in (ending.problem or "")
    hung = collector.pairs[PAIRS[0]]
    assert (hung.hang, hung.stopped) == (True, Engine.COPY_PUSH)
    assert collector.todo() == PAIRS[1:]
    assert supervisor.run({"mode": "collective"}).problem == supervisor.abandoned
    assert guard.started == 1
