"""A stock module in memory: what it means depends on what the driver grants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuguard.core.assess import assess
from gpuguard.core.facts import DriverFacts, Gpu, HostFacts, NextKernel, P2pFacts, P2pPair
from gpuguard.core.findings import Severity
from gpuguard.core.policy import Policy

GPUS = tuple(
    Gpu(index=i, uuid=f"GPU-{i}", pci_bus_id=f"0000:0{i}:00.0", name="card") for i in (0, 1)
)


def facts(status: str) -> HostFacts:
    pairs = tuple(
        P2pPair(src=a.uuid, dst=b.uuid, read=status, write=status)
        for a in GPUS
        for b in GPUS
        if a is not b
    )
    return HostFacts(
        kernels=(),
        running="6.8.0-90-generic",
        next=NextKernel(release="6.8.0-90-generic", source="grub"),
        driver=DriverFacts(userland="580.1.1", loaded="580.1.1", loaded_build_id="ab"),
        p2p=P2pFacts(source="nvml", gpus=GPUS, pairs=pairs),
        pci_gpus=tuple(gpu.pci_bus_id for gpu in GPUS),
    )


@pytest.mark.parametrize(
    ("status", "severity"), [("OK", Severity.WARNING), ("CNS", Severity.CRITICAL)]
)
def test_a_stock_module_is_critical_only_without_p2p(status: str, severity: Severity) -> None:
    findings = {f.code: f for f in assess(facts(status), Policy()).findings}
    assert findings["loaded-stock"].severity is severity


def test_nobody_answered_is_not_a_grant() -> None:
    silent = replace(facts("OK"), p2p=P2pFacts(problem="no answer"))
    findings = {f.code: f for f in assess(silent, Policy()).findings}
    assert findings["loaded-stock"].severity is Severity.CRITICAL
