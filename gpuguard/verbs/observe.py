"""Look at everything that has a metric: behind ``metrics`` and the daemon.

Each part can fail by itself: then its series are gone, and the others are there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from gpuguard.accepted import read_accepted
from gpuguard.config import Config
from gpuguard.core.assess import Assessment
from gpuguard.core.doctor_facts import Unread
from gpuguard.core.document import status_document
from gpuguard.core.facts import HostFacts, P2pFacts
from gpuguard.core.findings import Finding, Verdict
from gpuguard.core.metrics import Probe, Sample
from gpuguard.core.observation import Observation, Part
from gpuguard.core.p2p import Grant
from gpuguard.core.samples import (
    driver_problem,
    driver_samples,
    kernel_problem,
    kernel_samples,
    verdict_samples,
)
from gpuguard.core.samples_changes import gate_samples, hold_samples, rebuild_samples
from gpuguard.core.samples_deep import collective_samples, transfer_samples
from gpuguard.core.samples_lanes import lane_samples
from gpuguard.core.samples_p2p import could_look, topo_samples, unavailable_samples
from gpuguard.core.samples_pci import pci_samples
from gpuguard.deep.baseline import read_baseline
from gpuguard.deep_record import read_deep_record
from gpuguard.errors import GpuguardError, ProbeError
from gpuguard.host import Host
from gpuguard.host.reading import read_text
from gpuguard.last_run import read_last_run
from gpuguard.probes.iommu import probe_iommu
from gpuguard.probes.p2p import probe_p2p, probe_pci_gpus
from gpuguard.probes.params import probe_information
from gpuguard.probes.pci import probe_cards
from gpuguard.proof import read_gate_result
from gpuguard.serving.observed import has_lanes, observe_lanes
from gpuguard.state import QUEUE_FILE
from gpuguard.tally import read_tally
from gpuguard.verbs.inspect import judge_facts, look, policy_of

_Look = Callable[[], Iterable[Sample]]


def observe(host: Host, config: Config | None, trouble: Finding | None = None) -> Observation:
    """All parts, and the host judged as ``status`` does it.

    Args:
        host: where.
        config: what is wanted; None: the defaults.
        trouble: what is wrong with the configuration itself.
    """
    when, began = time.time(), time.monotonic()
    p2p = probe_p2p(host)
    asked = time.monotonic() - began
    topo = _part(Probe.TOPO, lambda: _topo(host, config, p2p), more_seconds=asked)
    parts = [_with_reasons(topo, p2p)]
    began = time.monotonic()
    try:
        facts = replace(look(host, config, with_p2p=False, strict=False), p2p=p2p)
        assessment = judge_facts(host, facts, config, trouble)
    except (GpuguardError, OSError) as error:
        seconds = time.monotonic() - began
        parts += [
            Part(probe=probe, seconds=seconds, problem=str(error))
            for probe in (Probe.KERNEL, Probe.DRIVER, Probe.HOLDS)
        ]
        verdict: Iterable[Sample] = verdict_samples(Verdict.UNKNOWN, ())
        status = {}
    else:
        seconds = time.monotonic() - began
        parts += _judged_parts(facts, assessment, seconds)
        verdict = verdict_samples(assessment.verdict, assessment.findings)
        status = status_document(facts, assessment, policy_of(config, read_accepted(host)))
    parts += [
        _part(Probe.PCI, lambda: _pci(host, config, p2p)),
        _part(Probe.REBUILD, lambda: _rebuilds(host)),
        _part(Probe.GATE, lambda: _gate(host)),
        *_lane_parts(host),
        *_deep_parts(host),
    ]
    return Observation(
        when=when,
        parts=tuple(parts),
        verdict=tuple(verdict),
        status=status,
        more=_for_people(host),
    )


def _judged_parts(facts: HostFacts, assessment: Assessment, seconds: float) -> list[Part]:
    looks: dict[Probe, tuple[str | None, _Look]] = {
        Probe.KERNEL: (
            kernel_problem(facts, assessment),
            lambda: kernel_samples(facts, assessment),
        ),
        Probe.DRIVER: (
            driver_problem(facts, assessment),
            lambda: driver_samples(facts, assessment),
        ),
        Probe.HOLDS: (
            assessment.holds.problem,
            lambda: hold_samples(assessment.holds, facts.holds.book),
        ),
    }
    return [
        Part(probe=probe, seconds=seconds, problem=problem)
        if problem is not None
        else _part(probe, found, more_seconds=seconds)
        for probe, (problem, found) in looks.items()
    ]


def _part(probe: Probe, found: _Look, *, more_seconds: float = 0.0) -> Part:
    began = time.monotonic() - more_seconds
    try:
        samples = tuple(found())
    except (GpuguardError, OSError, ValueError, KeyError, TypeError) as error:
        return Part(probe=probe, seconds=time.monotonic() - began, problem=_said(error))
    return Part(probe=probe, seconds=time.monotonic() - began, samples=samples)


def _said(error: Exception) -> str:
    return error.message if isinstance(error, GpuguardError) else f"{error!r}"


def _topo(host: Host, config: Config | None, p2p: P2pFacts) -> Iterable[Sample]:
    expected = policy_of(config, read_accepted(host)).expected
    grant = Grant(p2p=p2p, expected=expected.on_bus(probe_pci_gpus(host)))
    if not could_look(grant):
        raise ProbeError(p2p.problem or "nobody answered")
    return topo_samples(grant)


def _with_reasons(topo: Part, p2p: P2pFacts) -> Part:
    always = unavailable_samples(p2p, looked=topo.problem is None)
    return replace(topo, always=tuple(always))


def _pci(host: Host, config: Config | None, p2p: P2pFacts) -> Iterable[Sample]:
    uuids = {gpu.pci_bus_id: gpu.uuid for gpu in p2p.gpus}
    cards = probe_cards(host, probe_iommu(host), probe_information(host), {}, uuids)
    if isinstance(cards, Unread):
        if not uuids and probe_pci_gpus(host) == ():
            return ()
        raise ProbeError(f"{cards.place}: {cards.why}")
    excluded = config.p2p.exclude if config is not None else ()
    return pci_samples([card for card in cards if card.bus_id not in excluded], uuids)


def _rebuilds(host: Host) -> Iterable[Sample]:
    run = read_last_run(host)
    return rebuild_samples(
        read_tally(host),
        queued=os.path.lexists(host.path(QUEUE_FILE, follow=False)),
        last_run=None if run is None else (run.finished, run.exit_status),
    )


def _gate(host: Host) -> Iterable[Sample]:
    result = read_gate_result(host)
    return () if result is None else gate_samples(result.verdict, result.created)


def _for_people(host: Host) -> dict[str, str | None]:
    name = gate = None
    with suppress(GpuguardError):
        name = (read_text(host, "/etc/hostname") or "").strip() or None
    with suppress(GpuguardError):
        result = read_gate_result(host)
        gate = None if result is None else f"{result.message} ({result.created})"
    return {"host": name, "gate": gate}


def _lane_parts(host: Host) -> list[Part]:
    """None before the first switch of a lane."""
    if not has_lanes(host):
        return []
    return [_part(Probe.LANES, lambda: lane_samples(observe_lanes(host)))]


def _deep_parts(host: Host) -> list[Part]:
    """None before the first ``verify --deep``; else as old as that is."""
    try:
        record = read_deep_record(host)
    except GpuguardError as error:
        return [Part(probe=Probe.TRANSFER, seconds=0, problem=error.message)]
    if record is None:
        return []
    when, deep = record
    rates, _ = read_baseline(host)
    accepted = {(src, dst, engine.value): rate for (src, dst, engine), rate in rates.items()}
    parts = [_part(Probe.TRANSFER, lambda: transfer_samples(deep, accepted))]
    if deep.get("collective") is not None:
        parts.append(_part(Probe.COLLECTIVE, lambda: collective_samples(deep["collective"])))
    return [replace(part, when=when) for part in parts]
