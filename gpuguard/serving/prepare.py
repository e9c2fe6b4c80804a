"""``gpuguard lane prepare NAME``: what each start of a lane's unit does first.

Decides the environment from what is proven *now*, also after a boot or a crash, when nobody
switches; moves bytes over the cards where only those are missing. Also refuses a lane that nobody
chose: two of them do not fit on the cards.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpuguard.errors import PreflightError, ProbeError
from gpuguard.host import Host
from gpuguard.host.reading import read_bytes
from gpuguard.probes.kernels import probe_running
from gpuguard.probes.p2p import probe_pci_gpus
from gpuguard.serving import nccl_log
from gpuguard.serving.caches import FINGERPRINTS, make_cache
from gpuguard.serving.lane import Lane
from gpuguard.serving.machine import Step
from gpuguard.serving.p2p_policy import P2pDecision, fingerprint
from gpuguard.serving.proving import NOBODY, Prover, make_sure
from gpuguard.serving.render import env_file
from gpuguard.serving.sight import driver_of, proof_of
from gpuguard.serving.store import read_active, read_release, read_switch

_P2P_CACHE = "gpu_p2p_access_cache_for_*.json"
#: Steps in which the target may be started; before them the active lane serves.
_STARTS = frozenset({Step.STOP, Step.START, Step.READY, Step.IDENTITY, Step.GATE, Step.PROMOTE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What was decided for this start."""

    lane_id: str
    environment: dict[str, str]
    notes: tuple[str, ...]


def prepare(
    host: Host,
    name: str,
    prover: Prover = NOBODY,
    progress: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Write the environment of the next start, make its cache, move aside what is outdated.

    Args:
        host: where.
        name: of the lane.
        prover: who moves bytes where a proof by bytes is missing.
        progress: told what takes long.

    Raises:
        PreflightError: it must not start.
        ProbeError, StateError: what is recorded cannot be read.
    """
    lane = _chosen(host, name)
    # Without P2P it can start: once tried in vain is enough, or each crash would cost minutes.
    again = lane.requires.p2p == "required"
    decision = make_sure(host, lane, prover, progress, again=again)
    _refuse_unproven(lane, decision)
    notes = [decision.note] if decision.note else []
    folder, said = make_cache(host, lane)
    notes += said
    moved = _drop_outdated(host, lane, folder)
    notes += [f"moved aside, made for another driver, module or set of cards: {p}" for p in moved]
    nccl_log.forget(host, lane)
    environment = {**decision.environment, **nccl_log.variables(lane)}
    lines = "".join(f"{key}={value}\n" for key, value in environment.items())
    host.replace_file(env_file(name), f"# gpuguard lane prepare {name}\n{lines}".encode())
    return Prepared(lane_id=lane.lane_id, environment=environment, notes=tuple(notes))


def _refuse_unproven(lane: Lane, decision: P2pDecision) -> None:
    if decision.refusal is not None and decision.gap is not None:
        raise PreflightError(
            f"lane {lane.name} requires P2P, and is not started: {decision.refusal}",
            code="lane-p2p-unproven",
            hint=f"{decision.gap.remedy}; then gpuguard lane resume",
        )


def _chosen(host: Host, name: str) -> Lane:
    """The release that a switch under way starts, else the active one: never both at a time."""
    switch = read_switch(host)
    chosen = read_active(host).lane_id
    if switch is not None and switch.step in _STARTS:
        chosen = switch.target
    if chosen is not None:
        lane = read_release(host, chosen).lane
        if lane.name == name:
            return lane
    raise PreflightError(
        f"lane {name} is not the active one" + (f" ({chosen} is)" if chosen else ""),
        code="lane-not-active",
        hint=f"gpuguard lane switch {name}",
    )


def _drop_outdated(host: Host, lane: Lane, folder: Path) -> list[str]:
    """The engine writes its P2P cache once and believes it for ever."""
    cards: tuple[str, ...] = ()
    with suppress(ProbeError):
        cards = probe_pci_gpus(host)
    now = fingerprint(proof_of(host), probe_running(host), driver_of(host), cards)
    file = f"{FINGERPRINTS}/{lane.lane_id}.json"
    before = None
    with suppress(ValueError, ProbeError):
        before = json.loads(read_bytes(host, file, max_bytes=1 << 16) or b"null")
    moved: list[str] = []
    if before != now:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        for path in sorted(folder.glob(_P2P_CACHE)):
            path.rename(path.with_name(f"{path.name}.outdated-{stamp}"))
            moved.append(path.name)
        host.replace_file(file, json.dumps(now).encode())
    return moved
