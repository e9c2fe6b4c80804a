"""Is a lane that was started ready, still coming, or lost? And is it what its file says?

No I/O: what was seen goes in, a judgement comes out. ``/health`` alone decides nothing: it is 200
while an engine drains, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpuguard.serving.containers import Container, Mount
from gpuguard.serving.engine import Answer
from gpuguard.serving.lane import RESERVED_ENV, Lane, arguments
from gpuguard.serving.p2p_policy import crosses_cards
from gpuguard.serving.reading import fatal_line, hangs_in_nccl, pool_tokens, transports
from gpuguard.serving.systemd import UnitState

_OK = 200
_STOPPED_SECONDS = 5.0  # between the order to start and the beginning of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """One look at a lane that is starting.

    ``quiet``: seconds since its log grew. ``stopped``: since its unit does not even try to run.
    ``lines`` None: the log cannot be read. The answers are None where they were not asked for,
    because the one before was not good.
    """

    unit: UnitState
    lines: tuple[str, ...] | None
    quiet: float
    stopped: float = 0.0
    health: Answer | None = None
    models: Answer | None = None
    completion: Answer | None = None


def lost(lane: Lane, glance: Glance) -> str | None:
    """Why it will not come up any more; None: it still may."""
    lines = glance.lines or ()
    if (fatal := fatal_line(lines)) is not None:
        return f"the engine gave up: {fatal}"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    said = f"; its last line: {last}" if last else ""
    if (why := _unit_lost(glance)) is not None:
        return f"{glance.unit.name} {why}{said}"
    if hangs_in_nccl(lines) and glance.quiet >= lane.timeouts.no_progress:
        return (
            f"it says nothing since it named NCCL, {glance.quiet:.0f} s ago: P2P is suspected "
            "(collectives hang, though copies may work)"
        )
    return None


def _unit_lost(glance: Glance) -> str | None:
    unit = glance.unit
    if unit.is_queued:  # a gate that has failed runs again before each start, and may take minutes
        return None
    if unit.active == "failed" or unit.sub == "auto-restart":
        return f"ended ({unit.result}, status {unit.exit_status})"
    if unit.is_stopped and glance.stopped >= _STOPPED_SECONDS:
        loaded = f" ({unit.load})" if unit.load not in ("", "loaded") else ""
        return f"is {unit.active}{loaded}, and nothing starts it"
    if unit.restarts > 0:
        return "died while it was starting, and was started again"
    return None


def served(models: Any, name: str) -> dict[str, Any] | None:
    """The entry of ``/v1/models`` with this name."""
    entries = models.get("data") if isinstance(models, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("id") == name:
            return entry
    return None


def wrong_model(lane: Lane, models: Answer) -> str | None:
    """Why what is served is not this lane's model: no time will mend that."""
    if models.status != _OK:
        return None
    document = models.document
    entry = served(document, lane.model.served_name)
    if entry is None:
        entries = document.get("data", []) if isinstance(document, dict) else []
        names = ", ".join(str(one.get("id")) for one in entries if isinstance(one, dict))
        return f"it serves {names or 'nothing'}, not {lane.model.served_name}"
    length = entry.get("max_model_len")
    if lane.max_model_len is not None and length != lane.max_model_len:
        return f"max_model_len is {length}, the lane says {lane.max_model_len}"
    return None


def is_ready(glance: Glance) -> bool:
    """Health, models and one token: all three."""
    answers = (glance.health, glance.models, glance.completion)
    return all(answer is not None and answer.status == _OK for answer in answers)


def waits_for(glance: Glance) -> str:
    """What it has not shown yet, for a person who waits."""
    if glance.unit.is_queued:
        return f"the start of {glance.unit.name} waits for units before it, the gate for one"
    if not glance.unit.is_running:
        return f"{glance.unit.name} is {glance.unit.active or 'unknown'}"
    for name, answer in (("/health", glance.health), ("/v1/models", glance.models)):
        if answer is None or answer.status != _OK:
            return f"{name} does not answer yet"
    return "no token yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the running lane shows of itself.

    ``altered``: files of the lane that are not as they were written. ``command``: of the main
    process, if the engine is not in a container. ``container_problem``: why it cannot be seen.
    """

    unit: UnitState
    altered: tuple[str, ...]
    command: tuple[str, ...] | None
    expected_command: tuple[str, ...] | None
    metrics: str
    lines: tuple[str, ...] | None
    version: str | None
    nccl: tuple[str, ...] = ()  # what NCCL wrote into files of its own
    drop_ins: tuple[str, ...] = ()
    container: Container | None = None
    container_problem: str | None = None


def identity_problem(lane: Lane, seen: Evidence) -> str | None:
    """Why what runs is not what the lane says; None: it is, as far as can be seen."""
    if seen.altered or seen.unit.needs_reload:
        named = f": {', '.join(seen.altered)}" if seen.altered else ""
        return f"the files of {seen.unit.name} are not those that were written for it{named}"
    if seen.expected_command is not None:
        wanted = seen.expected_command[1:]
        if seen.command is None or seen.command[-len(wanted) :] != wanted:
            return f"process {seen.unit.pid} does not have the arguments of the lane"
    if seen.container_problem is not None:
        return seen.container_problem
    if seen.container is not None:
        for wrong in _container_problems(lane, seen.container):
            return f"container lane-{lane.name} {wrong}"
    if lane.expect.version is not None and seen.version != lane.expect.version:
        return f"the engine is {seen.version or 'of unknown version'}, not {lane.expect.version}"
    return _pool_problem(lane, seen) or _transport_problem(lane, seen)


def _container_problems(lane: Lane, seen: Container) -> Iterator[str]:
    if not seen.is_running:
        yield "does not run"
    if not seen.lane_image:
        yield f"runs, and its image {lane.engine.image} is not on this machine any more"
    elif seen.image != seen.lane_image:
        yield f"is of image {seen.image[:12]}, the lane's is {seen.lane_image[:12]}"
    wanted = arguments(lane)
    if wanted and seen.command[-len(wanted) :] != wanted:
        yield "does not have the arguments of the lane"
    own = {key: value for key, value in lane.env.items() if key not in RESERVED_ENV}
    for key, value in (own | seen.prepared).items():
        if seen.environment.get(key) != value:
            yield f"does not have the lane's value of {key}"
    for mount in (Mount(seen.model, is_writable=False), Mount(seen.cache, is_writable=True)):
        if mount not in seen.mounts:
            how = "writable" if mount.is_writable else "read-only"
            yield f"does not see {mount.source}, {how}"


def _pool_problem(lane: Lane, seen: Evidence) -> str | None:
    wanted = lane.expect.kv_tokens
    if wanted is None:
        return None
    tokens = pool_tokens(seen.metrics, seen.lines or ())
    if tokens is None:
        return f"it does not tell the size of its KV pool; {wanted} tokens are expected"
    if abs(tokens - wanted) > wanted * lane.expect.kv_tolerance:
        return (
            f"the KV pool has {tokens} tokens, {wanted} are expected "
            f"(± {lane.expect.kv_tolerance:.0%}): another type of cache, or less memory"
        )
    return None


def _transport_problem(lane: Lane, seen: Evidence) -> str | None:
    if lane.requires.p2p != "required" or not crosses_cards(lane):
        return None
    found = transports((*seen.nccl, *(seen.lines or ())))
    if not found:
        return (
            "how NCCL connects the cards cannot be seen, and the lane requires P2P: gpuguard asks "
            "NCCL to write it down unless env of the lane sets NCCL_DEBUG, NCCL_DEBUG_SUBSYS or "
            "NCCL_DEBUG_FILE; leave those out"
        )
    if found != {"P2P"}:
        return (
            f"NCCL goes via {', '.join(sorted(found))}, and the lane requires P2P between all "
            "cards (gpuguard doctor names the NCCL_P2P_LEVEL that these cards need)"
        )
    return None


def identity_notes(lane: Lane, seen: Evidence) -> tuple[str, ...]:
    """What could not be seen, and should be said."""
    notes = []
    if seen.drop_ins:
        notes.append(f"drop-ins have a say in how it runs: {', '.join(seen.drop_ins)}")
    if seen.lines is None:
        notes.append("the journal of the lane cannot be read")
    if lane.requires.p2p == "preferred" and crosses_cards(lane):
        found = transports((*seen.nccl, *(seen.lines or ())))
        if found != {"P2P"}:
            how = f"goes via {', '.join(sorted(found))}" if found else "does not tell"
            notes.append(f"P2P is preferred, and NCCL {how}")
    return tuple(notes)
