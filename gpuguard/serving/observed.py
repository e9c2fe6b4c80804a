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
from gpuguard.serving.lane import POLICY_VARIABLE
from gpuguard.serving.render import env_file

_RECORDS = (store.ACTIVE_FILE, store.SWITCH_FILE, store.HISTORY_FILE)


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


def started_without_p2p(host: Host, name: str) -> bool | None:
    """By what ``lane prepare`` wrote for the last start of a lane; None: not known."""
    try:
        text = read_text(host, env_file(name))
    except ProbeError:
        return None
    return None if text is None else f"{POLICY_VARIABLE}=1" in text.splitlines()


def _p2p(host: Host, lane_id: str | None) -> tuple[bool | None, bool | None]:
    """Whether the active lane wants P2P, and was started with it; None: not known."""
    if lane_id is None:
        return None, None
    wanted = None
    with suppress(ProbeError, StateError):  # root's alone: it has the lane's environment
        wanted = store.read_release(host, lane_id).lane.wants_p2p
    is_off = started_without_p2p(host, lane_id.rpartition("-")[0])
    return wanted, None if is_off is None else not is_off
