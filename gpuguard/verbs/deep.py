"""``verify --deep``: bytes over every ordered pair, and what they prove.

Everything that touches CUDA or NVML runs in children (``gpuguard.deep``), one after the other.
Needs the running system: bytes cannot be moved on a directory tree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuguard.core.deep import DeepJudgement
from gpuguard.core.deep_document import deep_document
from gpuguard.core.deep_facts import DeepFacts
from gpuguard.core.deep_findings import DEFAULT_REGRESSED_BELOW, judge
from gpuguard.deep.baseline import read_baseline, write_baseline
from gpuguard.deep.course import DeepRequest, run_course
from gpuguard.deep.supervise import COMMAND
from gpuguard.deep_record import keep_deep_record
from gpuguard.errors import UsageError
from gpuguard.host import Host
from gpuguard.verbs.clock import now


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepOutcome:
    """Facts, judgement, and whether a baseline was asked for and written."""

    facts: DeepFacts
    judgement: DeepJudgement
    asked: bool = False
    accepted: bool = False
    baseline: str | None = None  # why bandwidths could not be compared; None: they were

    @property
    def document(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            **deep_document(self.facts, self.judgement),
            "accepted": self.accepted,
            "baseline": self.baseline is None,
        }


def deep_verify(
    host: Host,
    request: DeepRequest | None = None,
    *,
    expected: Collection[tuple[str, str]] | None = None,
    accept: bool = False,
    acceptable: bool = True,
    regressed_below: float = DEFAULT_REGRESSED_BELOW,
    progress: Callable[[str], None] | None = None,
    command: Sequence[str] = COMMAND,
) -> DeepOutcome:
    """Move bytes over every ordered pair of cards, and judge.

    Args:
        host: the running system.
        request: what to do.
        expected: ordered pairs of UUIDs that must work; None: all.
        accept: record the bandwidths as the baseline, unless something is wrong or unknown.
        acceptable: False if something else speaks against accepting.
        regressed_below: share of the accepted bandwidth that is still fine.
        progress: called with the name of each step.
        command: the child.

    Raises:
        UsageError: ``--root`` is not ``/``.
        StateError: the accepted baseline cannot be read.
    """
    if not host.is_live and command is COMMAND:
        raise UsageError("--deep moves bytes on the running system; it cannot go with --root")
    # Whoever accepts anew does not need what was accepted before, readable or not.
    baseline, length = ({}, None) if accept else read_baseline(host)
    facts = run_course(host, request or DeepRequest(), progress=progress, command=command)
    if expected is not None:
        facts = replace(facts, expected=tuple(sorted(expected)))
    longest = max((span.length for span in facts.spans), default=0)
    if length not in (None, longest):  # small transfers are slower: the two do not compare
        baseline = {}
    judgement = judge(facts, baseline, regressed_below=regressed_below)
    accepted = accept and acceptable and judgement.healthy is True
    if accepted:
        write_baseline(host, facts.pairs, length=longest, accepted=now())
    outcome = DeepOutcome(
        facts=facts,
        judgement=judgement,
        asked=accept,
        accepted=accepted,
        baseline=None if baseline else _no_baseline(length),
    )
    if facts.problem is None and not (request and request.only):
        keep_deep_record(host, outcome.document)
    return outcome


def _no_baseline(length: int | None) -> str | None:
    if length is None:
        return "none: gpuguard verify --deep --accept records one"
    return f"none for this size: it was recorded with --size {length >> 20}"
