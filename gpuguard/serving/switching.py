"""Carry out a switch: write each step down, do it, ask ``machine`` what comes next."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from gpuguard.errors import GpuguardError, Interrupted, StateError
from gpuguard.host import Host
from gpuguard.proof import boot_id
from gpuguard.serving.machine import (
    NOTHING_STOPPED,
    Outcome,
    Role,
    Step,
    Switch,
    advance,
    interrupt,
    unwritten,
)
from gpuguard.serving.steps import Steps
from gpuguard.serving.store import (
    append_history,
    read_active,
    read_switch,
    remove_switch,
    write_switch,
)


@dataclass(slots=True)
class Result:
    """How a switch ended. ``serving``: the release that serves now."""

    switch: Switch
    serving: str | None
    entry: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """It always has one."""
        assert self.switch.outcome is not None  # noqa: S101 - run() ends with one
        return self.switch.outcome


class HostGoesDownError(GpuguardError):
    """The host shuts down in the middle of a switch, which waits for the next boot.

    Else every lane would be tried in vain, for systemd starts none any more, and none would be left
    as the one that serves.
    """

    code = "lane-host-goes-down"
    exit_status = os.EX_TEMPFAIL

    def __init__(self, switch: Switch) -> None:
        super().__init__(
            f"the host is going down (or systemd does not answer) in {switch.step} of "
            f"{switch.target}; the switch goes on after the next boot",
            hint="nothing is to be done; if it stays up after all: gpuguard lane resume",
        )


class SwitchStandsError(StateError):
    """A switch cannot go on, for no step can be written down; the record says where it is."""

    code = "lane-switch-stands"

    def __init__(self, switch: Switch, problem: str) -> None:
        super().__init__(
            f"{problem}; the switch to {switch.new} stands still before {switch.step}",
            hint="make room, then: gpuguard lane resume; who serves now: gpuguard lane status",
        )


def now() -> str:
    """RFC 3339, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def run(host: Host, switch: Switch, steps: Steps, say: Callable[[Switch], None]) -> Result:
    """Go through the steps to the end.

    A signal leads back to the lane before, which takes as long as its start; a second one ends
    the process, and the next run or boot goes on. While the host goes down nothing leads back.
    A step that cannot be written down is not begun and has failed: only what gives traffic back to
    a lane that runs is done all the same.

    Args:
        host: where.
        switch: where to begin.
        steps: who acts.
        say: told each step before it is begun.

    Raises:
        HostGoesDownError: a step failed, or was interrupted, because of that; the record stays.
        StateError: the first step cannot be written down, and nothing was done; or two in a row,
            and the record stays.
    """
    seconds: dict[str, float] = {}
    was_written: bool | None = None
    while switch.step is not Step.DONE:
        begun = time.monotonic()
        try:  # a signal may come at any time, also before the step has begun
            problem = _write_down(host, switch, was_written=was_written)
            was_written = problem is None
            if problem is None or switch.step is Step.UNDRAIN:
                say(switch)
                failure = _attempt(steps, switch)
                after = advance(switch, failure)
            else:
                failure, after = problem, unwritten(switch, problem)
        except Interrupted:
            failure, after = "interrupted", interrupt(switch)
        if failure is not None and switch.step not in NOTHING_STOPPED and steps.host_goes_down():
            raise HostGoesDownError(switch)
        key = switch.step.value if switch.role is Role.NEW else f"{switch.target}/{switch.step}"
        seconds[key] = round(seconds.get(key, 0.0) + time.monotonic() - begun, 1)
        switch = replace(after, notes=tuple(dict.fromkeys((*after.notes, *steps.notes))))
    with suppress(StateError):  # all is done, and done again if nobody comes to take it away
        write_switch(host, switch)
    return conclude(host, switch, steps, seconds)


def _write_down(host: Host, switch: Switch, *, was_written: bool | None) -> str | None:
    """Why it cannot be; ``was_written``: the step before, None: there is none."""
    try:
        write_switch(host, switch)
    except StateError as error:
        if was_written or switch.step is Step.UNDRAIN:
            return error.message
        if read_switch(host) is None:
            raise  # nothing was done
        raise SwitchStandsError(switch, error.message) from error
    return None


def _attempt(steps: Steps, switch: Switch) -> str | None:
    try:
        return steps.do(switch)
    except GpuguardError as error:
        return error.message
    except OSError as error:
        return f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")


def conclude(host: Host, switch: Switch, steps: Steps, seconds: dict[str, float]) -> Result:
    """Write the history, then forget the switch; done twice it is done once."""
    serving = None
    with suppress(GpuguardError):
        serving = read_active(host).lane_id
    entry = {
        "id": switch.switch_id,
        "kind": switch.kind,
        "started": switch.started,
        "ended": now(),
        "from": switch.old,
        "to": switch.new,
        "outcome": None if switch.outcome is None else switch.outcome.value,
        "serving": serving,
        "reasons": list(switch.reasons),
        "notes": list(switch.notes),
        "seconds": seconds,
        "starts": steps.starts,
        "kv_tokens": steps.kv_tokens,
        "gate": steps.gate,
    }
    try:
        append_history(host, entry)
    except OSError as error:  # a full disk does not undo what was switched
        text = f"the history cannot be written: {error.strerror}"
        switch = replace(switch, notes=(*switch.notes, text))
    remove_switch(host)
    return Result(switch, serving, entry)


def new_switch(
    host: Host, kind: str, new: str, old: str | None, chain: tuple[str, ...], note: str = ""
) -> Switch:
    """The first state of a switch that begins now."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    return Switch(
        switch_id=f"{stamp}-{new}",
        kind=kind,
        started=now(),
        boot_id=boot_id(host),
        new=new,
        old=old,
        chain=chain,
        notes=(note,) if note else (),
    )
