"""Look at the host: cheaply where nothing has changed, else in a child.

Runs in a thread of the daemon. Every program that it starts has a deadline, and ``stop`` ends
them all at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuguard import __version__
from gpuguard.core.facts import P2pFacts
from gpuguard.core.findings import Verdict
from gpuguard.core.metrics import REGULAR_PROBES, Probe
from gpuguard.core.observation import Observation, Part, decode
from gpuguard.core.samples import verdict_samples
from gpuguard.core.samples_p2p import unavailable_samples
from gpuguard.errors import ConfigError, GpuguardError, ProbeError
from gpuguard.host import LocalHost
from gpuguard.host.port import Completed, Deadline
from gpuguard.probes.fingerprint import fingerprint
from gpuguard.probes.p2p import probe_p2p
from gpuguard.serving.health import engine_answers
from gpuguard.state import JOURNAL_FILE

_CHILD = "from gpuguard.daemon.child import main; main()"
_SETTINGS_SECONDS = 20.0
_OBSERVE_SECONDS = 90.0
_GRACE = 0.3
#: A full look although nothing seems to have changed; sooner where a probe failed.
_FULL_SECONDS = 1800.0
_FULL_AFTER_FAILURE_SECONDS = 900.0
#: What a look was made from: files, the driver's answer, the engine's, the configuration.
_Seen = tuple[str, P2pFacts, bool | None, Mapping[str, Any] | None]
_PASSED_ON = ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "HOME")


class OtherVersionError(Exception):
    """What is installed by now is another gpuguard than this process."""


class StoppableHost(LocalHost):
    """A host whose programs can all be ended from another thread."""

    def __init__(self, root: Path | str = "/") -> None:
        super().__init__(root)
        self._running: set[Deadline] = set()
        self._stopped = False

    def run(self, *argv: str, timeout: float | Deadline, **how: Any) -> Completed:
        deadline = timeout if isinstance(timeout, Deadline) else Deadline(timeout)
        self._running.add(deadline)
        if self._stopped:
            deadline.give(0)
        try:
            return super().run(*argv, timeout=deadline, **how)
        finally:
            self._running.discard(deadline)

    def stop(self) -> None:
        """End what runs, now; what is started later ends at once."""
        self._stopped = True
        for deadline in tuple(self._running):
            deadline.give(0)


def ask_child(host: LocalHost, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Have a child answer.

    Raises:
        CommandError: it gave no answer.
        ProbeError: it answered nonsense.
        OtherVersionError: it is of another version.
        GpuguardError: what it says went wrong.
    """
    memory = os.memfd_create("gpuguard-request", flags=0)  # the child inherits it
    try:
        os.write(memory, json.dumps({"root": str(host.root), **request}).encode())
        os.lseek(memory, 0, os.SEEK_SET)
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        # as for the NVML child: nothing from the working directory, and no search through site
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        done = host.run(
            sys.executable, "-P", "-S", "-c", _CHILD, str(memory),
            timeout=timeout, env=environment, ok=None, grace=_GRACE, pass_fds=(memory,),
        )  # fmt: skip
    finally:
        os.close(memory)
    if done.exit_status != 0:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise ProbeError(f"the child that looks exited with {done.exit_status}: {last}")
    try:
        answer = json.loads(done.stdout)
        error, version = answer.get("error"), answer.pop("version", "unknown")
    except (ValueError, AttributeError) as failure:
        raise ProbeError(f"the child that looks answered nonsense: {failure}") from failure
    if version != __version__:
        raise OtherVersionError(f"gpuguard {version} is installed by now, this is {__version__}")
    if error is not None:
        raise _raised(error)
    return dict(answer)


def _raised(said: Mapping[str, Any]) -> GpuguardError:
    kind = ConfigError if said["exit_status"] == ConfigError.exit_status else ProbeError
    error = kind(said["message"], hint=said["hint"], code=said["code"], detail=said["detail"])
    error.exit_status = said["exit_status"]
    return error


class Looker:
    """Remembers what the last look was made from; ``config`` is the one in force."""

    def __init__(self, host: StoppableHost) -> None:
        self.host = host
        self.config: Mapping[str, Any] | None = None
        self._seen: _Seen | None = None
        self._last: Observation | None = None
        self._full_at = float("-inf")

    def settings(self, config_file: str) -> dict[str, Any]:
        """What the configuration says now; see ``child``.

        Raises:
            GpuguardError: see ``ask_child``.
        """
        request = {"do": "settings", "config_file": config_file}
        return ask_child(self.host, request, _SETTINGS_SECONDS)

    def look(self) -> Observation:
        """An observation, whatever happens."""
        when, began = time.time(), time.monotonic()
        try:
            config = self.config
            files, p2p = fingerprint(self.host), probe_p2p(self.host)
            asked = time.monotonic() - began
            seen = (files, p2p, _engine_answers(self.host), config)
            last = self._last
            if last is not None and not self._is_due(last, began, seen):
                self._last = _again(last, when, asked)
                return self._last
            request = {"do": "observe", "config": config}
            found = decode(ask_child(self.host, request, _OBSERVE_SECONDS))
        except (GpuguardError, OSError, ValueError) as error:
            self._seen = self._last = None
            return failed_observation(when, time.monotonic() - began, str(error))
        self._seen, self._last, self._full_at = seen, found, began
        return found

    def _is_due(self, last: Observation, now: float, seen: _Seen) -> bool:
        problems = [p.problem for p in last.parts if p.probe is not Probe.TOPO]
        patience = _FULL_AFTER_FAILURE_SECONDS if any(problems) else _FULL_SECONDS
        if self._seen != seen or now - self._full_at >= patience:
            return True
        return self.host.path(JOURNAL_FILE).exists()  # a change is under way, or was


def _engine_answers(host: LocalHost) -> bool | None:
    try:
        return engine_answers(host)
    except ProbeError:
        return None  # what is wrong is for the look itself to say


def _again(last: Observation, when: float, seconds: float) -> Observation:
    """Nothing has changed: the same is true now. Probes that failed have failed again."""
    parts = [
        replace(part, seconds=seconds) if part.probe is Probe.TOPO else part for part in last.parts
    ]
    return replace(last, when=when, parts=tuple(parts))


def failed_observation(when: float, seconds: float, problem: str) -> Observation:
    """Nobody could look: no series but those that say so."""
    always = {Probe.TOPO: tuple(unavailable_samples(P2pFacts(), looked=False))}
    return Observation(
        when=when,
        parts=tuple(
            Part(probe=probe, seconds=seconds, problem=problem, always=always.get(probe, ()))
            for probe in REGULAR_PROBES
        ),
        verdict=tuple(verdict_samples(Verdict.UNKNOWN, ())),
    )
