"""The gate after boot: wait for the cards' device nodes, verify, keep the proof."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from gpuguard.core.expectation import Expectation
from gpuguard.core.verify import Verification, VerifyFacts
from gpuguard.core.verify import verify as judge
from gpuguard.host import Host
from gpuguard.host.reading import list_dir
from gpuguard.probes.kernels import probe_running
from gpuguard.probes.p2p import probe_pci_gpus
from gpuguard.proof import Proof, boot_id, remove_proof, write_proof
from gpuguard.verbs.clock import now
from gpuguard.verbs.verify import look_at_p2p

_NODE = re.compile(r"nvidia\d+")
_DRIVEN = "/proc/driver/nvidia/gpus"
_LOOK_AGAIN = 0.2
_FOR_CLIENTS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What the gate found. ``nodes``: they were all there; ``notes``: for the log."""

    facts: VerifyFacts
    verification: Verification
    nodes: bool
    notes: tuple[str, ...] = ()


def pass_gate(host: Host, expected: Expectation, *, wait: float, timeout: float) -> Passage:
    """Verify once the nodes are there or ``wait`` seconds are over; keep or remove the proof.

    What has not come by then is for the verification to judge: NVML makes missing nodes itself.

    Raises:
        ProbeError: the PCI bus cannot be read.
        StateError: our own records cannot be read, or the proof cannot be written.
    """
    remove_proof(host)  # first of all: whatever ends this run early must not leave an old one
    nodes = wait_for_nodes(host, expected, wait)
    facts = look_at_p2p(host, expected, timeout=timeout)
    verification = judge(facts)
    if verification.exit_status == 0:
        write_proof(host, _proof(host, facts, verification))
    return Passage(facts=facts, verification=verification, nodes=nodes)


def wait_for_nodes(host: Host, expected: Expectation, seconds: float) -> bool:
    """Wait until ``/dev`` has nvidiactl and a node for each expected card; False: it has not.

    Where nothing makes nodes but the first client, the driver is there long before them: then
    five seconds are enough.
    """
    began = time.monotonic()
    while (waited := time.monotonic() - began) < seconds:
        wanted = expected.on_bus(probe_pci_gpus(host)).number or 0
        if _has_nodes(host, wanted):
            return True
        if waited >= _FOR_CLIENTS and len(list_dir(host, _DRIVEN)) >= wanted:
            return False
        time.sleep(min(_LOOK_AGAIN, seconds - waited))
    return _has_nodes(host, expected.on_bus(probe_pci_gpus(host)).number or 0)


def _has_nodes(host: Host, wanted: int) -> bool:
    names = list_dir(host, "/dev")
    cards = sum(_NODE.fullmatch(name) is not None for name in names)
    return wanted == 0 or ("nvidiactl" in names and cards >= wanted)


def _proof(host: Host, facts: VerifyFacts, verification: Verification) -> Proof:
    grant = verification.grant
    return Proof(
        boot_id=boot_id(host),
        created=now(),
        verdict=verification.verdict.value,
        kernel=probe_running(host),
        driver=facts.driver.loaded,
        build_id=facts.driver.loaded_build_id,
        identity=facts.loaded,
        cards=tuple(gpu.uuid for gpu in grant.seen),
        pairs=len(grant.expected.expected_pairs(grant.seen)),
        source="+".join(verification.sources),
    )
