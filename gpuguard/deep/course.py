"""The course of a deep check: look, refuse or go on, pairs, all-reduce; then facts.

Nothing is started beside compute processes unless asked to, nor beside a child of an earlier
check that still hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import permutations
from typing import Any

from gpuguard.core.deep_facts import (
    HANG_AT_START,
    OUTSTANDING,
    REFUSED,
    UNAVAILABLE,
    DeepCard,
    DeepFacts,
    DeepPair,
    Problem,
    Workload,
)
from gpuguard.core.virtual import guest_of
from gpuguard.deep.allreduce import run_allreduce
from gpuguard.deep.collect import Collector
from gpuguard.deep.spans import fitting, make_spans
from gpuguard.deep.supervise import COMMAND, Deadlines, Ending, Supervisor
from gpuguard.deep.workloads import find_workloads
from gpuguard.host.port import Host
from gpuguard.probes.guard import OutstandingError, guarded
from gpuguard.probes.virt import probe_virt

DEFAULT_SIZE = 256 << 20
_LOG_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepRequest:
    """What to look at, and how far to go.

    ``size_bytes`` is the longest transfer; each of a pair's two cards gives a little more
    memory than that. ``only``: cards by index, UUID or PCI bus id; empty: all.
    """

    size_bytes: int = DEFAULT_SIZE
    only: tuple[str, ...] = ()
    beside_workloads: bool = False
    collective: bool = True
    deadlines: Deadlines = field(default_factory=Deadlines)


def run_course(
    host: Host,
    request: DeepRequest,
    *,
    progress: Callable[[str], None] | None = None,
    command: Sequence[str] = COMMAND,
    begin: Callable[[], None] = lambda: None,
) -> DeepFacts:
    """Everything that a deep check finds out; ``begin`` is called before the first byte moves."""
    collector = Collector()
    try:
        with guarded(host, wait=request.deadlines.look) as guard:
            supervisor = Supervisor(
                guard, collector, request.deadlines, command=command, progress=progress
            )
            return _run(host, request, supervisor, collector, begin)
    except OutstandingError as error:
        problem = replace(OUTSTANDING, text=error.message)
        return DeepFacts(virtualised=_virtualised(host), problem=problem)


def _run(
    host: Host,
    request: DeepRequest,
    supervisor: Supervisor,
    collector: Collector,
    begin: Callable[[], None],
) -> DeepFacts:
    looked = supervisor.run({"mode": "look"})
    workloads = tuple(find_workloads(host, collector.processes))
    common: dict[str, Any] = {"workloads": workloads, "virtualised": _virtualised(host)}
    if (problem := _refusal(request, looked, workloads)) is not None:
        cards = collector.chosen(request.only)
        return DeepFacts(cards=cards, **common, problem=problem)
    common["spans"] = make_spans(fitting(request.size_bytes, collector.cards.values()))
    spans = [asdict(span) for span in common["spans"]]
    begin()
    ending = supervisor.run_pairs({"only": request.only, "spans": spans})
    cards = collector.chosen(request.only)
    if (problem := _no_pairs(collector, ending)) is not None:
        return DeepFacts(cards=cards, **common, problem=problem)
    if request.collective and supervisor.abandoned is None and collector.is_granted():
        common["collective"] = run_allreduce(supervisor, collector, [card.uuid for card in cards])
    return _facts(cards, collector.pairs, ending, common)


def _refusal(request: DeepRequest, looked: Ending, workloads: Sequence[Workload]) -> Problem | None:
    if looked.hang:
        return replace(HANG_AT_START, text=f"NVML hangs: {looked.problem}")
    if not workloads or request.beside_workloads:
        return None
    return replace(
        REFUSED,
        text=f"{len(workloads)} processes compute on the cards; nothing was tested",
        evidence=tuple((f"pid {w.pid}", f"{w.name} ({w.source})") for w in workloads),
    )


def _no_pairs(collector: Collector, ending: Ending) -> Problem | None:
    if collector.unavailable is not None:
        return collector.unavailable
    if collector.pairs:
        return None
    log = list(collector.log)[-_LOG_SHOWN:]
    return replace(
        HANG_AT_START if ending.hang else UNAVAILABLE,
        text=ending.problem or "CUDA shows no card, or none of those named",
        evidence=tuple((f"log {number}", line) for number, line in enumerate(log)),
    )


def _facts(
    cards: Sequence[DeepCard],
    seen: Mapping[tuple[str, str], DeepPair],
    ending: Ending,
    common: Mapping[str, Any],
) -> DeepFacts:
    """Every pair of all cards is there, also those that nobody came to."""
    uuids = [card.uuid for card in cards]
    expected = list(permutations(uuids, 2)) if len(uuids) > 1 else [(u, u) for u in uuids]
    unseen = ending.problem or "CUDA does not see both cards"
    pairs = [seen.get(p) or DeepPair(src=p[0], dst=p[1], problem=unseen) for p in expected]
    return DeepFacts(
        cards=tuple(cards),
        pairs=tuple(pair for pair in pairs if pair.src != pair.dst),
        self_tests=tuple(pair for pair in pairs if pair.src == pair.dst),
        **common,
    )


def _virtualised(host: Host) -> str | None:
    """The virtual machine's name; None on real hardware."""
    return guest_of(probe_virt(host))
