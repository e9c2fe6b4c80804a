"""Who else is on the cards? Asked before anything is stopped.

A process that is none of a lane's keeps its memory when the lane that serves is stopped: then no
lane can start, and nothing serves. What a display needs is no reason to refuse: the memory counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from gpuguard.core.doctor_facts import NvmlCard
from gpuguard.errors import CommandError, ProbeError
from gpuguard.host import Host
from gpuguard.host.reading import read_text
from gpuguard.serving.memory import allowed_bytes, look_at_cards
from gpuguard.serving.store import read_baseline
from gpuguard.serving.systemd import Systemd

_TOOL_SECONDS = 20.0
_ANCESTORS = 64


def strangers(
    cards: Iterable[NvmlCard], own: frozenset[int], baseline: dict[str, int]
) -> Iterator[str]:
    """What processes that are not ours keep of each card. No I/O."""
    for card in cards:
        foreign = [pid for pid in card.processes if pid not in own]
        if not foreign:
            continue
        known = dict(card.process_bytes)
        amount: int | None = None
        if all(pid in known for pid in foreign):
            amount = sum(known[pid] for pid in foreign)
        elif len(foreign) == len(card.processes):
            amount = card.memory_used_bytes
        pids = ", ".join(map(str, foreign))
        if amount is None:
            if not card.display_active:
                yield f"{card.bus_id} is used by others (processes on it: {pids})"
        elif amount > allowed_bytes(card, baseline):
            yield f"{card.bus_id} has {amount >> 20} MiB in use by others (processes on it: {pids})"


def stranger_problem(host: Host, names: frozenset[str]) -> tuple[str | None, str | None]:
    """Why the cards would not be free once our lanes are stopped, and why nobody could look.

    Args:
        host: where.
        names: of our lanes.
    """
    cards, note = look_at_cards(host)
    if note is not None:
        return None, f"whether others use the cards is not known: {note}"
    pids = {pid for card in cards for pid in card.processes}
    own = frozenset(_own(host, pids, names)) if pids else frozenset()
    return "; ".join(strangers(cards, own, read_baseline(host))) or None, None


def _own(host: Host, pids: set[int], names: frozenset[str]) -> Iterator[int]:
    """By control group, as systemd, Podman and Docker make them; else by parents."""
    units = {f"lane-{name}.service" for name in names}
    groups = {pid: _group(host, pid) for pid in pids}
    left = set()
    for pid, group in groups.items():
        if units & set(group.split("/")):
            yield pid
        else:
            left.add(pid)
    if not left:
        return
    containers = _containers(host, names)
    mains = {Systemd(host).show(unit).pid for unit in units} - {0}
    for pid in left:
        if any(one in groups[pid] for one in containers) or mains & set(_line(host, pid)):
            yield pid


def _group(host: Host, pid: int) -> str:
    with suppress(ProbeError):
        return (read_text(host, f"/proc/{pid}/cgroup") or "").strip()
    return ""


def _line(host: Host, pid: int) -> Iterator[int]:
    """A process, its parent, and so on."""
    for _ in range(_ANCESTORS):
        if pid <= 1:
            return
        yield pid
        text = ""
        with suppress(ProbeError):
            text = read_text(host, f"/proc/{pid}/status") or ""
        parents = [line.split()[1] for line in text.splitlines() if line.startswith("PPid:")]
        pid = int(parents[0]) if parents else 0


def _containers(host: Host, names: frozenset[str]) -> tuple[str, ...]:
    """Docker keeps its containers in groups of their own, by id."""
    found: list[str] = []
    for name in sorted(names):
        try:
            done = host.run(
                "docker", "ps", "-q", "--no-trunc",
                "--filter", f"label=com.docker.compose.project=lane-{name}", timeout=_TOOL_SECONDS,
            )  # fmt: skip
        except CommandError:  # also: there is no docker
            return tuple(found)
        found += [word for word in done.stdout.split() if len(word) >= 12]  # noqa: PLR2004
    return tuple(found)
