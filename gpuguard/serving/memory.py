"""Is the cards' memory free again after a lane was stopped?

An engine that starts beside the rest of another one runs out of memory, is started again, and so
on. What is in use without a lane (a display) is remembered while none runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuguard.core.doctor_facts import NvmlCard
from gpuguard.errors import CommandError, ProbeError, StateError
from gpuguard.host import Host
from gpuguard.probes.cards_nvml import probe_nvml_cards
from gpuguard.serving.store import read_baseline, write_baseline

_MARGIN = 512 << 20
_UNKNOWN_BASELINE = 2 << 30
_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class MemoryView:
    """``problem``: what is not free; ``note``: why nobody could look."""

    problem: str | None = None
    note: str | None = None


def still_in_use(
    cards: Iterable[NvmlCard], baseline: dict[str, int], margin: int = _MARGIN
) -> Iterator[str]:
    """What keeps each card from being free. Processes alone do not: a display has some, too."""
    for card in cards:
        if card.memory_used_bytes is None:
            continue
        allowed = allowed_bytes(card, baseline, margin)
        if card.memory_used_bytes > allowed:
            used, limit = card.memory_used_bytes >> 20, allowed >> 20
            pids = ", ".join(map(str, card.processes))
            whose = f" (processes on it: {pids})" if pids else ""
            yield f"{card.bus_id} has {used} MiB in use, at most {limit} are expected{whose}"


def allowed_bytes(card: NvmlCard, baseline: dict[str, int], margin: int = _MARGIN) -> int:
    """What a card may have in use although no lane runs."""
    return baseline.get(card.uuid, _UNKNOWN_BASELINE - margin) + margin


def wait_until_free(host: Host, seconds: float) -> MemoryView:
    """Wait until the memory of every card is back, for at most so long."""
    deadline = time.monotonic() + seconds
    while True:
        cards, problem = look_at_cards(host)
        if problem is not None:
            return MemoryView(note=f"whether the cards' memory is free is not known: {problem}")
        found = list(still_in_use(cards, read_baseline(host)))
        if not found or time.monotonic() >= deadline:
            return MemoryView(problem="; ".join(found) or None)
        time.sleep(_POLL_SECONDS)


def remember_baseline(host: Host) -> None:
    """While no lane runs: keep the least that the cards were ever seen to have in use."""
    cards, problem = look_at_cards(host)
    known = read_baseline(host)  # the least: else what leaks at each switch would become usual
    used = {
        card.uuid: min(card.memory_used_bytes, known.get(card.uuid, card.memory_used_bytes))
        for card in cards
        if card.memory_used_bytes is not None
    }
    if problem is None and used:
        write_baseline(host, used)


def look_at_cards(host: Host) -> tuple[tuple[NvmlCard, ...], str | None]:
    """What NVML says of every card, and what is missing from it."""
    try:
        cards, problem = probe_nvml_cards(host)
    except (CommandError, ProbeError, StateError) as error:
        return (), error.message
    return tuple(cards.values()), problem
