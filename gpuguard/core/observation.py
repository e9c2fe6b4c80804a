"""One look at a host, as series and for a person; as JSON between the daemon and its child."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuguard.core.metrics import BY_NAME, Probe, Sample

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one probe found; ``problem`` None: it could look. Else it has no ``samples``.

    ``always`` are there in both cases: why it could not look.
    """

    probe: Probe
    seconds: float
    samples: tuple[Sample, ...] = ()
    always: tuple[Sample, ...] = ()
    problem: str | None = None
    when: float | None = None  # of a look that others made: a person's verify --deep


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All probes of one look, the verdict, and ``status``: what ``status --json`` prints.

    ``more`` is for a person: ``host`` (its name), ``gate`` (what the gate said).
    """

    when: float  # seconds since the epoch
    parts: tuple[Part, ...]
    verdict: tuple[Sample, ...] = ()
    status: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


def encode(observation: Observation) -> dict[str, Any]:
    """As a JSON object, ``gpuguard --json metrics``."""
    return {
        "schema": SCHEMA,
        "when": observation.when,
        "verdict": [_sample(entry) for entry in observation.verdict],
        "parts": [
            {
                "probe": part.probe.value,
                "seconds": part.seconds,
                "success": part.problem is None,
                "problem": part.problem,
                "when": part.when,
                "samples": [_sample(entry) for entry in part.samples],
                "always": [_sample(entry) for entry in part.always],
            }
            for part in observation.parts
        ],
        "status": observation.status,
        "more": observation.more,
    }


def decode(document: Mapping[str, Any]) -> Observation:
    """The reverse of ``encode``.

    Raises:
        ValueError: it is no such object.
    """
    try:
        if document["schema"] != SCHEMA:
            raise ValueError(f"unknown schema {document['schema']}")
        return Observation(
            when=float(document["when"]),
            verdict=tuple(map(_read_sample, document["verdict"])),
            parts=tuple(map(_read_part, document["parts"])),
            status=dict(document["status"]),
            more=dict(document["more"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no observation: {error!r}") from error


def _read_part(document: Mapping[str, Any]) -> Part:
    return Part(
        probe=Probe(document["probe"]),
        seconds=float(document["seconds"]),
        samples=tuple(map(_read_sample, document["samples"])),
        always=tuple(map(_read_sample, document["always"])),
        problem=document["problem"],
        when=document["when"],
    )


def _sample(entry: Sample) -> dict[str, Any]:
    labels = dict(zip(BY_NAME[entry.name].labels, entry.labels, strict=True))
    return {"name": entry.name, "labels": labels, "value": entry.value}


def _read_sample(document: Mapping[str, Any]) -> Sample:
    metric = BY_NAME[document["name"]]
    labels = tuple(str(document["labels"][name]) for name in metric.labels)
    return Sample(metric.name, labels, float(document["value"]))
