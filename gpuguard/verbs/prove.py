"""Prove P2P by bytes for whoever is about to use it: a lane that is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuguard.core.expectation import Expectation
from gpuguard.core.verify import verify
from gpuguard.deep.course import DeepRequest
from gpuguard.deep.supervise import COMMAND, Deadlines
from gpuguard.errors import GpuguardError
from gpuguard.host import Host
from gpuguard.verbs.deep import deep_verify
from gpuguard.verbs.verify import look_at_p2p


def prove_bytes(
    host: Host,
    expected: Expectation,
    seconds: float,
    progress: Callable[[str], None],
    command: Sequence[str] = COMMAND,
) -> str | None:
    """Move bytes over every expected pair of all cards; why that proves nothing, or None.

    The result is recorded (``proof``), so that the next start of this boot need not do it again.

    Args:
        host: the running system.
        expected: cards and pairs that must work.
        seconds: for all of it.
        progress: called with the name of each step.
        command: the child.
    """
    try:
        grant = verify(look_at_p2p(host, expected)).grant
        pairs = grant.expected.expected_pairs(grant.seen)
        outcome = deep_verify(
            host,
            DeepRequest(deadlines=Deadlines(total=seconds)),
            expected=None if grant.p2p.source is None else pairs,
            progress=progress,
            command=command,
        )
    except GpuguardError as error:
        return error.message
    return outcome.unproven
