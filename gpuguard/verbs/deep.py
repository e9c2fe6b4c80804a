"""``verify --deep``: bytes over every ordered pair, and what they prove.

Everything that touches CUDA or NVML runs in children (``gpuguard.deep``), one after the other.
Needs the running system: bytes cannot be moved on a directory tree. What root finds out is
recorded as this boot's proof, for lanes that want P2P.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuguard.core.deep import DeepJudgement
from gpuguard.core.deep_document import deep_document
from gpuguard.core.deep_facts import DeepFacts
from gpuguard.core.deep_findings import DEFAULT_REGRESSED_BELOW, judge
from gpuguard.core.deep_proof import missing_proof, reduces
from gpuguard.deep.baseline import read_baseline, write_baseline
from gpuguard.deep.course import DeepRequest, run_course
from gpuguard.deep.supervise import COMMAND
from gpuguard.deep_record import keep_deep_record
from gpuguard.errors import UsageError
from gpuguard.host import Host
from gpuguard.probes.driver import probe_driver
from gpuguard.probes.kernels import probe_running
from gpuguard.proof import DeepProof, boot_id, remove_deep_proof, write_deep_proof
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
    def unproven(self) -> str | None:
        """Why this is no proof that a serving stack may use P2P; None: it is one."""
        return missing_proof(self.judgement, self.facts.collective)

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
        ProbeError: the driver's versions cannot be read.
        StateError: the accepted baseline cannot be read, or the proof not written.
    """
    if not host.is_live and command is COMMAND:
        raise UsageError("--deep moves bytes on the running system; it cannot go with --root")
    # Whoever accepts anew does not need what was accepted before, readable or not.
    baseline, length = ({}, None) if accept else read_baseline(host)
    asked = request or DeepRequest()
    record = _Recorder(host, asked)
    facts = run_course(host, asked, progress=progress, command=command, begin=record.begin)
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
    record.keep(outcome)
    if facts.problem is None and not asked.only:
        keep_deep_record(host, outcome.document)
    return outcome


class _Recorder:
    """The proof of this boot: a check of everything makes it anew, one of a part may end it."""

    def __init__(self, host: Host, request: DeepRequest) -> None:
        self._host = host
        self._is_whole = request.collective and not request.only
        self._has_begun = False
        self._is_root = os.geteuid() == 0
        self._kernel = probe_running(host)
        self._driver = probe_driver(host)

    def begin(self) -> None:
        """Bytes will move: whatever ends this early must not leave an old proof."""
        self._has_begun = True
        if self._is_whole and self._is_root:
            remove_deep_proof(self._host)

    def keep(self, outcome: DeepOutcome) -> None:
        """Write down what was found, if it is for us to say."""
        is_fault = outcome.judgement.healthy is False
        if not self._is_root or not self._has_begun or not (self._is_whole or is_fault):
            return
        proof = DeepProof(
            boot_id=boot_id(self._host),
            created=now(),
            kernel=self._kernel,
            driver=self._driver.loaded,
            build_id=self._driver.loaded_build_id,
            cards=tuple(card.uuid for card in outcome.facts.cards),
            pairs=sum(p.verified for p in outcome.judgement.pairs if p.pair.src != p.pair.dst),
            all_reduce=reduces(outcome.facts.collective),
            problem=outcome.unproven,
            is_fault=is_fault,
        )
        write_deep_proof(self._host, proof)


def _no_baseline(length: int | None) -> str | None:
    if length is None:
        return "none: gpuguard verify --deep --accept records one"
    return f"none for this size: it was recorded with --size {length >> 20}"
