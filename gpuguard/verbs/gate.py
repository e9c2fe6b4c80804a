"""The gate after boot: wait for the cards' device nodes, verify, keep the proof."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from gpuguard.core.expectation import Expectation
from gpuguard.core.gate import gate_line, is_open
from gpuguard.core.verify import Verification, VerifyFacts
from gpuguard.core.verify import verify as judge
from gpuguard.errors import ProbeError, StateError
from gpuguard.host import Host
from gpuguard.host.reading import list_dir
from gpuguard.probes.kernels import probe_running
from gpuguard.probes.p2p import probe_pci_gpus
from gpuguard.proof import (
    GateResult,
    Proof,
    boot_id,
    remove_deep_proof,
    remove_proof,
    write_gate_result,
    write_proof,
)
from gpuguard.verbs.clock import now
from gpuguard.verbs.verify import look_at_p2p
from gpuguard.verbs.window import close_after_boot, waits_for
from gpuguard.window import Phase

_NODE = re.compile(r"nvidia\d+")
_DRIVEN = "/proc/driver/nvidia/gpus"
_LOOK_AGAIN = 0.2
_FOR_CLIENTS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What the gate found. ``line``: in one sentence; ``notes``: what else is to be told."""

    facts: VerifyFacts
    verification: Verification
    line: str
    notes: tuple[str, ...] = ()


def pass_gate(host: Host, expected: Expectation, *, wait: float, timeout: float) -> Passage:
    """Verify once the nodes are there or ``wait`` seconds are over; keep or remove the proof.

    What has not come by then is for the verification to judge: NVML makes missing nodes itself.
    A maintenance window that waited for this boot is closed with what was found.

    Raises:
        ProbeError: the PCI bus cannot be read.
        StateError: our own records cannot be read, or the proof cannot be written.
    """
    remove_proof(host)  # first of all: whatever ends this run early must not leave an old one
    nodes = wait_for_nodes(host, expected, wait)
    facts = look_at_p2p(host, expected, timeout=timeout)
    verification = judge(facts)
    proof = _proof(host, facts, verification) if is_open(verification) else None
    if proof is not None:
        write_proof(host, proof)
    else:
        remove_deep_proof(host)  # what bytes have shown was shown of another state
    line = gate_line(facts, verification, nodes=nodes)
    record_result(host, verification.verdict, line)
    notes = _close_window(host, verification, proof)
    return Passage(facts=facts, verification=verification, line=line, notes=notes)


def record_result(host: Host, verdict: str, message: str) -> None:
    """What the gate said, for metrics and page; that it cannot be kept shuts no gate."""
    result = GateResult(boot_id=boot_id(host), created=now(), verdict=verdict, message=message)
    with suppress(OSError):
        write_gate_result(host, result)


def _close_window(host: Host, verification: Verification, proof: Proof | None) -> tuple[str, ...]:
    try:
        window = close_after_boot(
            host, verification.verdict.value, None if proof is None else asdict(proof)
        )
    except (ProbeError, StateError) as error:  # P2P is as it is, whatever our records are
        return (f"the maintenance window's record could not be closed: {error.message}",)
    if window is None:
        return ()
    if window.phase is Phase.WAITING:
        boot = window.boots[-1]
        came = f"kernel {boot.release or 'unknown'}, driver {boot.driver or 'none'}"
        awaited = waits_for(host, window)
        return (f"maintenance window {window.id} stays open: {came} came up, not {awaited}",)
    changes = ", ".join(f"{c.name} {c.old or 'new'} -> {c.new or 'gone'}" for c in window.changes)
    proven = "P2P is proven" if proof is not None else "P2P is NOT proven"
    return (f"maintenance window {window.id} is closed, {proven}; it changed: {changes or '-'}",)


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
        visible=len(grant.p2p.gpus),
        together=grant.together,
    )
