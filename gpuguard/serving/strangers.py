"""Who else is on the cards? Asked before anything is stopped.

A process that is none of a lane's keeps its memory when the lane that serves is stopped: then no
lane can start, and nothing serves. What a display needs is no reason to refuse: the memory counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from gpuguard.core.doctor_facts import NvmlCard
from gpuguard.errors import CommandError, CommandNotFoundError, ProbeError
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
    own, unasked = own_pids(host, pids, names) if pids else (frozenset(), ())
    found = list(strangers(cards, own, read_baseline(host)))
    return "; ".join((*found, *unasked)) if found else None, None


def own_pids(
    host: Host, pids: set[int], names: frozenset[str]
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Which processes are of our lanes, and who could not be asked about the others.

    By control group, as systemd, Podman and Docker make them; else by parents.

    Args:
        host: where.
        pids: of processes, whoever's.
        names: of our lanes.
    """
    units = {f"lane-{name}.service" for name in names}
    groups = {pid: _group(host, pid) for pid in pids}
    # as Quadlet runs containers, too: a group of their own below the unit's
    own = {pid for pid, group in groups.items() if units & set(group.split("/"))}
    if own == pids:
        return frozenset(own), ()
    mains = {Systemd(host).show(unit).pid for unit in units} - {0}
    own |= {pid for pid in pids - own if mains & set(_line(host, pid))}
    containers, unasked = _containers(host, names) if own != pids else ((), ())
    own |= {pid for pid in pids - own if any(one in groups[pid] for one in containers)}
    return frozenset(own), unasked if own != pids else ()


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


def _containers(host: Host, names: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ids of our containers: Docker's are in groups of their own, and so may be Podman's."""
    found: list[str] = []
    unasked: list[str] = []
    ours = {f"lane-{name}" for name in names}
    for tool in ("docker", "podman"):
        command = (tool, "ps", "--no-trunc", "--format={{.ID}} {{.Names}}")
        try:
            lines = host.run(*command, timeout=_TOOL_SECONDS).stdout.splitlines()
        except CommandNotFoundError:
            continue
        except CommandError as error:
            unasked.append(f"whether they are in a container of ours is not known: {error.message}")
            continue
        rows = [line.split() for line in lines]
        found += [row[0] for row in rows if len(row) == 2 and row[1] in ours]  # noqa: PLR2004
    return tuple(found), tuple(unasked)
