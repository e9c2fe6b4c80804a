"""Is everything here that a deep check needs? Asked before anything is stopped for one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gpuguard.deep.supervise import COMMAND, environment
from gpuguard.errors import CommandError
from gpuguard.host.port import Host

_SECONDS = 60.0
_GRACE = 2.0


def missing_tools(host: Host, command: Sequence[str] = COMMAND) -> str | None:
    """What is missing for bytes over pairs and an all-reduce; the cards are left alone."""
    request = json.dumps({"mode": "tools"})
    try:
        done = host.run(
            *command, request, timeout=_SECONDS, grace=_GRACE, ok=None, env=environment()
        )
    except CommandError as error:
        return error.message
    for line in done.stdout.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict) and answer.get("kind") == "tools":
            problem = answer.get("problem")
            return None if problem is None else str(problem)
    last = (done.stderr.strip() or done.stdout.strip() or "no answer").splitlines()[-1]
    return f"the child that looks for them failed: {last}"
