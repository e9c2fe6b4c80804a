"""An all-reduce with P2P off and one with P2P on, each in a child of its own."""

from __future__ import annotations

from collections.abc import Sequence

from gpuguard.core.deep_facts import CollectiveFacts, CollectiveOutcome, CollectiveRun
from gpuguard.deep.collect import Collector
from gpuguard.deep.supervise import Ending, Supervisor

_BYTES = 32 << 20
_COMMON = {
    "NCCL_DEBUG": "INFO",  # says which transport it took
    "NCCL_NVLS_ENABLE": "0",  # NVLink multicast is another mechanism than P2P
    # Its ranks meet over a socket, by itself on the first interface that is not loopback; a unit
    # that may talk to loopback alone (gpuguard-lane-resume) would not get there.
    "NCCL_SOCKET_IFNAME": "lo",
}
_OFF = {"NCCL_P2P_DISABLE": "1"}
#: Also between cards behind the CPU, where NCCL by itself prefers host memory.
_ON = {"NCCL_P2P_LEVEL": "SYS"}


def run_allreduce(
    supervisor: Supervisor, collector: Collector, uuids: Sequence[str]
) -> CollectiveFacts | None:
    """The A/B comparison; None for fewer than two cards."""
    if len(uuids) <= 1:
        return None
    request = {"mode": "collective", "cards": list(uuids), "length": _BYTES}
    runs: list[CollectiveRun] = []
    # Off comes first: with P2P on a child may be left behind that cannot be killed.
    for env in (_OFF, _ON):
        collector.forget_collective()
        ending = supervisor.run(request, {**_COMMON, **env})
        if collector.collective.get("outcome") == "missing":
            return CollectiveFacts(problem=collector.collective["detail"])
        runs.append(_run(collector, ending))
    version = collector.collective.get("version")
    return CollectiveFacts(without_p2p=runs[0], with_p2p=runs[1], version=version)


def _run(collector: Collector, ending: Ending) -> CollectiveRun:
    transport = ", ".join(sorted(collector.transports)) or None
    answer = collector.collective
    if "outcome" in answer:
        outcome = CollectiveOutcome(answer["outcome"])
        detail = answer.get("detail", "")
    else:
        outcome = CollectiveOutcome.HANG if ending.hang else CollectiveOutcome.ERROR
        detail = ending.problem or "no answer"
    return CollectiveRun(outcome=outcome, transport=transport, detail=detail)
