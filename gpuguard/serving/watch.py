"""Watch a lane come up, and look at what came up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpuguard.host import Host
from gpuguard.host.reading import read_bytes
from gpuguard.serving import nccl_log
from gpuguard.serving.containers import container_drop_ins, look_at_container
from gpuguard.serving.engine import Engine
from gpuguard.serving.install import altered_files
from gpuguard.serving.lane import Lane
from gpuguard.serving.readiness import Evidence, Glance, is_ready, lost, waits_for, wrong_model
from gpuguard.serving.render import cache_dir, command
from gpuguard.serving.store import Release
from gpuguard.serving.systemd import Systemd, UnitState

_OK = 200
_POLL_SECONDS = 0.25
_TOKEN_SECONDS = 60.0
_MAX_COMMAND = 1 << 20


@dataclass(slots=True)
class _Trace:
    """What was seen of one start's log. ``grew``: when it last did, on the monotonic clock."""

    grew: float
    tried: float = 0.0  # when its unit was last seen to run or to come up
    invocation: str = ""
    lines: tuple[str, ...] | None = None

    def note(self, lines: tuple[str, ...] | None) -> None:
        if lines != self.lines:
            self.lines, self.grew = lines, time.monotonic()


class Watch:
    """Looks at lanes; changes nothing."""

    def __init__(self, host: Host, systemd: Systemd, progress: Callable[[str], None]) -> None:
        self._host = host
        self._systemd = systemd
        self._progress = progress

    def until_ready(self, lane: Lane, seconds: float) -> str | None:
        """Wait until it is ready; why it is not, or None."""
        begun = time.monotonic()
        trace = _Trace(begun, begun)
        waits = "it was not looked at"
        while (left := begun + seconds - time.monotonic()) > 0:
            glance = self._glance(lane, trace)
            if (problem := lost(lane, glance)) is not None:
                return problem
            if glance.models is not None and (problem := wrong_model(lane, glance.models)):
                return problem
            if is_ready(glance):
                return None
            waits = waits_for(glance)
            elapsed = time.monotonic() - begun
            self._progress(f"{waits} ({elapsed:.0f} s of at most {seconds:.0f} s)")
            time.sleep(min(_POLL_SECONDS, left))
        return f"not ready after {seconds:.0f} s: {waits}"

    def _glance(self, lane: Lane, trace: _Trace) -> Glance:
        unit = self._systemd.show(lane.unit)
        if not unit.is_stopped:
            trace.tried = time.monotonic()
        trace.invocation = trace.invocation or unit.invocation
        # of the first start, even if it is in its second one by now: why it died is said there
        lines = self._systemd.log(replace(unit, invocation=trace.invocation))
        trace.note(lines)
        engine = Engine(lane.port)
        health = engine.get("/health") if unit.is_running else None
        models = engine.get("/v1/models") if health and health.status == _OK else None
        completion = None
        if models is not None and wrong_model(lane, models) is None and models.status == _OK:
            body = {"model": lane.model.served_name, "prompt": "1", "max_tokens": 1}
            completion = engine.post("/v1/completions", body, timeout=_TOKEN_SECONDS)
        return Glance(
            unit=unit,
            lines=lines,
            quiet=time.monotonic() - trace.grew,
            stopped=time.monotonic() - trace.tried,
            health=health,
            models=models,
            completion=completion,
        )

    def evidence(self, release: Release) -> Evidence:
        """What runs, as it shows itself."""
        lane = release.lane
        unit = self._systemd.show(lane.unit)
        engine = Engine(lane.port)
        version = engine.get("/version").document
        is_venv = lane.engine.backend == "venv"
        container, unseen = (
            (None, None)
            if is_venv
            else look_at_container(self._host, lane, cache_dir(lane.lane_id))
        )
        return Evidence(
            unit=unit,
            altered=altered_files(self._host, release),
            drop_ins=(*unit.drop_ins, *container_drop_ins(self._host, lane)),
            container=container,
            container_problem=unseen,
            command=self._command_of(unit) if is_venv else None,
            expected_command=command(lane) if is_venv else None,
            metrics=engine.get("/metrics").text,
            lines=self._systemd.log(unit),
            version=version.get("version") if isinstance(version, dict) else None,
            nccl=nccl_log.lines(self._host, lane),
        )

    def _command_of(self, unit: UnitState) -> tuple[str, ...] | None:
        content = read_bytes(self._host, f"/proc/{unit.pid}/cmdline", max_bytes=_MAX_COMMAND)
        if not content:
            return None
        return tuple(content.decode("utf-8", "replace").rstrip("\0").split("\0"))
