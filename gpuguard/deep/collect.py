"""From the child's lines to facts. Lines that are not of the protocol are kept as the log."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from gpuguard.core.deep_facts import (
    NOT_INSTALLED,
    UNAVAILABLE,
    Check,
    DeepCard,
    DeepPair,
    Engine,
    NvLink,
    Problem,
    Rate,
)
from gpuguard.core.expectation import normal_bus_id
from gpuguard.deep.pairs import is_named

UuidPair = tuple[str, str]

_LOG_LINES = 25
#: NCCL_DEBUG=INFO: ``Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer`` (2.19 to 2.28).
_TRANSPORT = re.compile(r"NCCL INFO Channel .* -> .* via (\S+(?: pointer)?)")


class Collector:
    """Takes lines of one child after the other."""

    def __init__(self) -> None:
        self.cards: dict[str, DeepCard] = {}
        self.nvlinked: dict[UuidPair, bool | None] = {}
        self.processes: dict[int, list[str]] = {}  # pid -> UUIDs of its cards
        self.planned: list[UuidPair] | None = None
        self.pairs: dict[UuidPair, DeepPair] = {}
        self.unavailable: Problem | None = None
        self.look_problem: str | None = None
        self.collective: dict[str, str] = {}
        self.transports: set[str] = set()
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self.ended = False
        self._now: tuple[str, UuidPair | None] | None = None  # what is under way
        self._takers: dict[str, Callable[[dict[str, Any]], None]] = {
            "look": self._look,
            "cards": self._cards,
            "unavailable": self._unavailable,
            "step": self._step,
            "grant": self._grant,
            "check": self._check,
            "rate": self._rate,
            "latency": self._latency,
            "failed": self._failed,
            "pair-end": self._pair_end,
            "end": self._end,
            "collective": self._collective,
        }

    @property
    def under_way(self) -> str:
        """The step that was begun last, for people."""
        if self._now is None:
            return "start"
        name, pair = self._now
        return name if pair is None else f"{name}, {pair[0]} -> {pair[1]}"

    def begin(self) -> None:
        """A new child starts."""
        self._now, self.ended = None, False

    def take(self, line: str) -> str | None:
        """Take one line; returns the name of the step that it begins, if it does."""
        try:
            fact = json.loads(line)
            self._takers[fact["kind"]](fact)
        except (ValueError, KeyError, TypeError, AttributeError):
            if line.strip():
                self.log.append(line)
            if match := _TRANSPORT.search(line):
                self.transports.add(match[1])
            return None
        return str(fact["name"]) if fact["kind"] == "step" else None

    def close(self, problem: str, *, hang: bool) -> None:
        """The child is gone; a pair that was under way did not come to its end."""
        if self._now is None:
            return
        step, pair = self._now
        self._now = None
        if pair is not None:
            self._change(pair, stopped=step, hang=hang, problem=problem, cannot_tell=not hang)

    def chosen(self, only: Sequence[str]) -> tuple[DeepCard, ...]:
        """Cards that NVML or CUDA shows, by index; ``only`` as ``pairs.is_named`` takes it."""
        cards = sorted(self.cards.values(), key=lambda card: card.index)
        return tuple(c for c in cards if not only or is_named(c.uuid, c.index, c.pci_bus_id, only))

    def is_granted(self) -> bool:
        """Does the driver grant access on every pair of different cards that was begun."""
        real = [pair for pair in self.pairs.values() if pair.src != pair.dst]
        return bool(real) and all(pair.grant is True for pair in real)

    def forget_collective(self) -> None:
        """Another all-reduce follows."""
        self.collective = {}
        self.transports = set()

    def todo(self) -> list[UuidPair]:
        """Planned pairs that have not been begun."""
        return [pair for pair in self.planned or () if pair not in self.pairs]

    def _look(self, fact: dict[str, Any]) -> None:
        self.look_problem = fact["problem"]
        self.cards = {card["uuid"]: _card(card) for card in fact.get("cards", ())}
        self.nvlinked = {(src, dst): known for src, dst, known in fact.get("nvlinked", ())}
        for process in fact.get("processes", ()):
            self.processes.setdefault(process["pid"], []).append(process["uuid"])

    def _cards(self, fact: dict[str, Any]) -> None:
        for card in fact["cards"]:
            self.cards.setdefault(card["uuid"], _card(card))
        if self.planned is None:
            self.planned = [_pair(pair) for pair in fact["pairs"]]

    def _unavailable(self, fact: dict[str, Any]) -> None:
        kind = UNAVAILABLE if fact["installed"] else NOT_INSTALLED
        self.unavailable = replace(kind, text=str(fact["problem"]))

    def _step(self, fact: dict[str, Any]) -> None:
        pair = _pair(fact["pair"]) if "pair" in fact else None
        self._now = fact.get("engine") or fact["name"], pair
        if pair is not None and pair not in self.pairs:
            self.pairs[pair] = DeepPair(src=pair[0], dst=pair[1], nvlink=self.nvlinked.get(pair))

    def _grant(self, fact: dict[str, Any]) -> None:
        self._change(_pair(fact["pair"]), grant=bool(fact["grant"]))

    def _check(self, fact: dict[str, Any]) -> None:
        check = Check(
            engine=Engine(fact["engine"]),
            span=int(fact["span"]),
            mismatches=int(fact["mismatches"]),
            first=fact.get("first"),
            expected=fact.get("expected"),
            found=fact.get("found"),
            kind=fact.get("kind_of_fault", ""),
            sample_equal=fact["sample_equal"] is True,
        )
        pair = _pair(fact["pair"])
        self._change(pair, checks=(*self.pairs[pair].checks, check))

    def _rate(self, fact: dict[str, Any]) -> None:
        rate = Rate(engine=Engine(fact["engine"]), bytes_per_second=float(fact["bytes_per_second"]))
        pair = _pair(fact["pair"])
        self._change(pair, rates=(*self.pairs[pair].rates, rate))

    def _latency(self, fact: dict[str, Any]) -> None:
        self._change(
            _pair(fact["pair"]),
            load_latency_seconds=fact["load_latency_seconds"],
            copy_latency_seconds=fact["copy_latency_seconds"],
        )

    def _failed(self, fact: dict[str, Any]) -> None:
        step = self._now[0] if self._now is not None else "start"
        self._change(
            _pair(fact["pair"]),
            stopped=step,
            problem=str(fact["problem"]),
            cannot_tell=fact["cannot_tell"] is True,
        )
        self._now = None

    def _pair_end(self, fact: dict[str, Any]) -> None:
        self._change(_pair(fact["pair"]), complete=True)
        self._now = None

    def _end(self, _fact: dict[str, Any]) -> None:
        self.ended = True

    def _collective(self, fact: dict[str, Any]) -> None:
        self.collective = {key: str(value) for key, value in fact.items()}

    def _change(self, pair: UuidPair, **changes: Any) -> None:
        self.pairs[pair] = replace(self.pairs[pair], **changes)


def _pair(pair: Iterable[str]) -> UuidPair:
    src, dst = pair
    return src, dst


def _card(card: dict[str, Any]) -> DeepCard:
    links = card.get("nvlinks")
    return DeepCard(
        index=card["index"],
        uuid=card["uuid"],
        pci_bus_id=normal_bus_id(card["pci_bus_id"]),
        name=card["name"],
        pcie_generation=card.get("pcie_generation"),
        pcie_width=card.get("pcie_width"),
        memory_free_bytes=card.get("memory_free_bytes"),
        nvlinks=None if links is None else tuple(_nvlink(link) for link in links),
    )


def _nvlink(link: dict[str, Any]) -> NvLink:
    remote = link["remote_bus_id"]
    return NvLink(
        remote_bus_id=None if remote is None else normal_bus_id(remote),
        to_switch=link["to_switch"],
        bytes_per_second=link["bytes_per_second"],
    )
