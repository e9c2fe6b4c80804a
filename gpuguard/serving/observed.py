"""What the metrics tell of the lanes: from their records, which everybody may read."""

from __future__ import annotations

import os
from contextlib import suppress

from gpuguard.core.samples_lanes import LaneFacts
from gpuguard.errors import ProbeError, StateError
from gpuguard.host import Host
from gpuguard.host.reading import read_text
from gpuguard.serving import store
from gpuguard.serving.health import engine_answers
from gpuguard.serving.render import env_file

_RECORDS = (store.ACTIVE_FILE, store.SWITCH_FILE, store.HISTORY_FILE)
_P2P_OFF = "NCCL_P2P_DISABLE=1"


def observe_lanes(host: Host) -> LaneFacts:
    """The lanes as they are recorded, and whether the engine answers.

    Raises:
        ProbeError, StateError: a record cannot be read.
    """
    switch, active = store.read_switch(host), store.read_active(host)
    wanted, is_on = _p2p(host, active.lane_id)
    return LaneFacts(
        active=active.lane_id,
        was_active=active.lane_id is not None or active.last_good is not None,
        step=None if switch is None else switch.step.value,
        started=None if switch is None else switch.started,
        switches=tuple(
            (str(entry.get("outcome")), str(entry.get("ended")))
            for entry in store.read_history(host)
        ),
        ready=engine_answers(host),
        p2p_wanted=wanted,
        p2p_on=is_on,
    )


def has_lanes(host: Host) -> bool:
    """Whether anything was ever switched here."""
    return any(os.path.lexists(host.path(file)) for file in _RECORDS)


def _p2p(host: Host, lane_id: str | None) -> tuple[bool | None, bool | None]:
    """Whether the active lane wants P2P, and was started with it; None: not known."""
    wanted = is_on = None
    if lane_id is None:
        return wanted, is_on
    with suppress(ProbeError, StateError):  # root's alone: it has the lane's environment
        wanted = store.read_release(host, lane_id).lane.requires.p2p != "none"
    with suppress(ProbeError):
        environment = read_text(host, env_file(lane_id.rpartition("-")[0]))
        is_on = None if environment is None else _P2P_OFF not in environment.splitlines()
    return wanted, is_on
