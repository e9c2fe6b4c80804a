"""No driver is loaded: that is fine only where no card is expected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuguard.core.assess import assess
from gpuguard.core.expectation import Expectation, Origin
from gpuguard.core.facts import DriverFacts, HostFacts, NextKernel, P2pFacts
from gpuguard.core.findings import Finding, Severity
from gpuguard.core.p2p_reasons import NO_DRIVER
from gpuguard.core.policy import Policy
from gpuguard.demo.tree import add_cards
from tests.box import Box
from tests.schema import check_status

CARDS = tuple(f"0000:0{i}:00.0" for i in range(1, 5))
FACTS = HostFacts(
    kernels=(),
    running="6.8.0-90-generic",
    next=NextKernel(release="6.8.0-90-generic", source="grub"),
    p2p=P2pFacts(problem="no NVIDIA driver is loaded", reason=NO_DRIVER),
    pci_gpus=CARDS,
)
TWO = Expectation(origin=Origin.CONFIGURATION, count=2)


def said(facts: HostFacts, policy: Policy | None = None) -> dict[str, Finding]:
    findings = assess(facts, policy or Policy()).findings
    return {f.code: f for f in findings if f.subject in ("driver", "p2p")}


def test_four_cards_and_no_driver() -> None:
    found = said(FACTS)
    assert list(found) == ["driver-not-loaded"]
    finding = found["driver-not-loaded"]
    assert finding.severity is Severity.CRITICAL
    assert finding.message.endswith("4 cards are expected by the PCI bus")
    assert tuple(finding.evidence) == CARDS


@pytest.mark.parametrize("origin", [Origin.CONFIGURATION, Origin.ACCEPTED])
def test_expected_and_neither_loaded_nor_on_the_bus(origin: Origin) -> None:
    policy = Policy(expected=replace(TWO, origin=origin))
    finding = said(replace(FACTS, pci_gpus=()), policy)["driver-not-loaded"]
    assert finding.severity is Severity.UNKNOWN
    assert "none is seen on the PCI bus" in finding.message


@pytest.mark.parametrize(
    ("facts", "policy"),
    [
        (replace(FACTS, pci_gpus=()), Policy()),
        (FACTS, Policy(expected=Expectation(exclude=CARDS))),
        (FACTS, Policy(expected=replace(TWO, count=0))),
        (replace(FACTS, running=None), Policy()),
    ],
    ids=["no card", "all meant for something else", "none wanted", "a disk at rest"],
)
def test_where_nothing_is_to_be_said(facts: HostFacts, policy: Policy) -> None:
    assert said(facts, policy) == {}


def test_what_could_not_be_looked_at_is_not_called_unloaded() -> None:
    facts = replace(FACTS, driver=DriverFacts(problem="permission denied"))
    assert list(said(facts)) == ["driver-undetermined"]


def test_a_module_without_a_version_is_asked_about() -> None:
    facts = replace(FACTS, driver=DriverFacts(loaded_build_id="ab"))
    assert "p2p-unknown" in said(facts)


def test_status_of_a_running_host_and_of_its_disk(box: Box) -> None:
    box.rebuilt()
    assert box.status()["verdict"] == "ok"
    add_cards(box.root, 4)
    answer = box.run("status")
    assert answer.status == 1
    assert "[driver-not-loaded]" in answer.out
    document = box.status()
    check_status(document)
    assert document["verdict"] == "critical"
    box.path("proc/sys/kernel/osrelease").unlink()  # the same disk, mounted elsewhere
    assert "driver-not-loaded" not in box.run("status").out
