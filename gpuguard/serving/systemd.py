"""Ask and command systemd through ``systemctl``, and the journal through ``journalctl``."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from gpuguard.errors import CommandError
from gpuguard.host import Host

_ANSWER_SECONDS = 30.0
_POLL_SECONDS = 0.2
_AFTER_KILL = 30.0
_LINES = 400
_PROPERTIES = (
    "LoadState", "ActiveState", "SubState", "Result", "MainPID", "NRestarts", "InvocationID",
    "FragmentPath", "SourcePath", "NeedDaemonReload", "ExecMainStatus", "ExecMainCode",
    "DropInPaths", "Job",
)  # fmt: skip
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_OF_COMPOSE = re.compile(
    r"Attaching to lane-\S+|lane-\S+ exited with code \d+|Aborting on container exit\.\.\."
)
_STOPPED = frozenset({"inactive", "failed"})
#: States of the whole system in which units can be started.
_UP = frozenset({"initializing", "starting", "running", "degraded", "maintenance"})


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitState:
    """What ``systemctl show`` says of a unit; see systemd's D-Bus documentation for the words."""

    name: str
    load: str = ""
    active: str = ""
    sub: str = ""
    result: str = ""
    pid: int = 0
    restarts: int = 0
    invocation: str = ""
    fragment: str = ""
    source: str = ""
    needs_reload: bool = False
    exit_status: int = 0
    drop_ins: tuple[str, ...] = ()
    job: int = 0

    @property
    def is_queued(self) -> bool:
        """It does not run, and will: its start waits for what must come before it."""
        return self.active in _STOPPED and self.job > 0

    @property
    def is_stopped(self) -> bool:
        """Nothing of it runs, and nothing will by itself."""
        return self.active in _STOPPED and self.job == 0

    @property
    def is_running(self) -> bool:
        """Its main process was started and has not ended."""
        return self.active == "active" and self.pid > 0


def parse_show(name: str, text: str) -> UnitState:
    """The answer of ``systemctl show -p …``."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return UnitState(
        name=name,
        load=values.get("LoadState", ""),
        active=values.get("ActiveState", ""),
        sub=values.get("SubState", ""),
        result=values.get("Result", ""),
        pid=_number(values.get("MainPID")),
        restarts=_number(values.get("NRestarts")),
        invocation=values.get("InvocationID", ""),
        fragment=values.get("FragmentPath", ""),
        source=values.get("SourcePath", ""),
        needs_reload=values.get("NeedDaemonReload") == "yes",
        exit_status=_number(values.get("ExecMainStatus")),
        drop_ins=tuple(
            path for path in values.get("DropInPaths", "").split() if not path.startswith("/usr/")
        ),
        job=_number(values.get("Job")),
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


class Systemd:
    """The service manager of the running system."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def show(self, unit: str) -> UnitState:
        """How a unit is; a unit that does not exist is ``not-found`` and inactive.

        Raises:
            CommandError: there is no systemd, or it does not answer.
        """
        done = self._host.run(
            "systemctl", "show", unit, "-p", ",".join(_PROPERTIES), timeout=_ANSWER_SECONDS
        )
        return parse_show(unit, done.stdout)

    def start(self, unit: str) -> None:
        """Queue its start, however often it failed before; does not wait.

        Raises:
            CommandError: systemd refuses.
        """
        self._host.run("systemctl", "reset-failed", unit, timeout=_ANSWER_SECONDS, ok=None)
        self._host.run("systemctl", "start", "--no-block", unit, timeout=_ANSWER_SECONDS)

    def stop(self, unit: str, seconds: float) -> UnitState:
        """Stop it, with SIGKILL when the time is over; the state afterwards.

        A start that is queued is taken back.

        Raises:
            CommandError: systemd refuses or does not answer.
        """
        state = self.show(unit)
        if state.is_stopped:
            return state
        self._host.run("systemctl", "stop", "--no-block", unit, timeout=_ANSWER_SECONDS)
        state = self._wait_stopped(unit, seconds)
        if not state.is_stopped:
            self._host.run("systemctl", "kill", "-s", "KILL", unit, timeout=_ANSWER_SECONDS)
            state = self._wait_stopped(unit, _AFTER_KILL)
        return state

    def _wait_stopped(self, unit: str, seconds: float) -> UnitState:
        deadline = time.monotonic() + seconds
        while not (state := self.show(unit)).is_stopped and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return state

    def reload(self) -> None:
        """Let systemd read its unit files again.

        Raises:
            CommandError: it does not answer.
        """
        self._host.run("systemctl", "daemon-reload", timeout=2 * _ANSWER_SECONDS)

    def is_going_down(self) -> bool:
        """Whether nothing can be started any more: a shutdown is under way, or nobody answers."""
        try:
            done = self._host.run(
                "systemctl", "is-system-running", timeout=_ANSWER_SECONDS, ok=None
            )
        except CommandError:
            return True
        return done.stdout.strip() not in _UP

    def log(self, state: UnitState) -> tuple[str, ...] | None:
        """The last lines that this start of the unit wrote; None: they cannot be read.

        What Podman tells the journal of its own (events, health checks) is not the engine's. What
        compose adds is taken out: escape sequences before lines, and a few lines of its own.
        """
        if not state.invocation:
            return None
        try:
            done = self._host.run(
                "journalctl", "--no-pager", "-q", "-o", "cat", "-n", str(_LINES),
                f"_SYSTEMD_INVOCATION_ID={state.invocation}", "_TRANSPORT=stdout",
                timeout=_ANSWER_SECONDS,
            )  # fmt: skip
        except CommandError:
            return None
        lines = (_ESCAPE.sub("", line) for line in done.stdout.splitlines())
        return tuple(line for line in lines if not _OF_COMPOSE.fullmatch(line))
