"""All series of one moment: an observation, and what gpuguard knows of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpuguard import __version__
from gpuguard.core.metrics import REGULAR_PROBES, Probe, Sample, sample
from gpuguard.core.observation import Observation, Part


@dataclass(slots=True, kw_only=True)
class Health:
    """What gpuguard knows of itself; times in seconds since the epoch, 0: never."""

    interval: float = 0.0  # 0: no daemon
    observed: float = 0.0
    config_ok: bool = True
    config_read: float = 0.0
    last_success: dict[Probe, float] = field(default_factory=dict)


def note_successes(health: Health, observation: Observation) -> None:
    """Remember when each probe could look last."""
    health.observed = observation.when
    for part in observation.parts:
        if part.problem is None:
            health.last_success[part.probe] = part.when or observation.when


def all_samples(observation: Observation | None, health: Health) -> Iterator[Sample]:
    """Everything, for one exposition; without an observation no probe has succeeded."""
    yield sample("gpuguard_build_info", 1, __version__)
    yield from observation.verdict if observation is not None else ()
    if health.observed:
        yield sample("gpuguard_observation_timestamp_seconds", health.observed)
    yield sample("gpuguard_observation_interval_seconds", health.interval)
    yield sample("gpuguard_config_last_reload_successful", health.config_ok)
    yield sample("gpuguard_config_last_reload_success_timestamp_seconds", health.config_read)
    parts = {part.probe: part for part in observation.parts} if observation is not None else {}
    yield from _probe_samples(parts, health)
    for part in parts.values():
        yield from part.always
        if part.problem is None:
            yield from part.samples


def _probe_samples(parts: Mapping[Probe, Part], health: Health) -> Iterable[Sample]:
    for probe in (*REGULAR_PROBES, *(p for p in parts if p not in REGULAR_PROBES)):
        part = parts.get(probe)
        name = probe.value
        yield sample("gpuguard_probe_success", part is not None and part.problem is None, name)
        if part is not None:
            yield sample("gpuguard_probe_duration_seconds", part.seconds, name)
        last = health.last_success.get(probe, 0.0)
        yield sample("gpuguard_probe_last_success_timestamp_seconds", last, name)
