"""The deep check on the cards of this machine; skipped where there are none."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuguard.core.deep_facts import Engine, Span
from gpuguard.core.deep_pattern import Tag
from gpuguard.core.expectation import normal_bus_id
from gpuguard.deep.course import DeepRequest
from gpuguard.deep.supervise import Deadlines
from gpuguard.host import LocalHost
from gpuguard.verbs.deep import deep_verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not Path("/dev/nvidiactl").exists() or importlib.util.find_spec("cuda") is None,
        reason="needs a card, and pip install -e '.[deep]'",
    ),
]

MIB = 1 << 20


def test_the_port_on_one_card() -> None:
    from gpuguard.deep.cuda_driver import DriverCuda

    cuda = DriverCuda()
    tag = Tag(0, 0, 3, 1)
    at = cuda.allocate(0, MIB)
    for offset in (0, 8, 13):  # aligned to 16, to 8, to nothing
        cuda.fill(0, at + offset, 65536, tag.seed)
        cuda.wait(0)
        assert cuda.compare(0, at + offset, 65536, tag.seed).mismatches == 0
        assert cuda.read(0, at + offset, 4096) == tag.words(0, 512)
    cuda.spread(0, at + 13 + 800, 8, 0)
    cuda.wait(0)
    found = cuda.compare(0, at + 13, 65536, tag.seed)
    assert (found.mismatches, found.first, found.found) == (1, 100, 0)
    cuda.free(0, at)


@pytest.mark.parametrize("size", [MIB, 8 * MIB])
def test_every_engine_is_right_and_measured(size: int) -> None:
    outcome = deep_verify(LocalHost(), DeepRequest(size_bytes=size, collective=False))
    assert outcome.facts.problem is None
    for judged in outcome.judgement.pairs:
        assert judged.verified, judged.reason
        assert {rate.engine for rate in judged.pair.rates} == set(Engine)
        assert judged.pair.load_latency_seconds is not None
    if len(outcome.facts.cards) > 1:
        assert outcome.judgement.healthy is True
    else:
        assert outcome.judgement.healthy is None
        assert [f.code for f in outcome.judgement.findings] == ["deep-no-pair"]
    json.dumps(outcome.document)


def test_the_engines_are_compared_with_what_really_lies_there() -> None:
    """The check fails on a real card when the data is spoilt after it was sent."""
    from gpuguard.deep.cuda_driver import DriverCuda
    from gpuguard.deep.transfer import check_spans, open_lane

    class Spoiling(DriverCuda):
        lane_dst = 0

        def wait(self, card: int) -> None:
            super().wait(card)
            if self.lane_dst:
                super().spread(card, self.lane_dst + 1024, 8, 0)
                super().wait(card)

    cuda = Spoiling()
    lane = open_lane(cuda, 0, 0, MIB)
    cuda.lane_dst = lane.dst_at
    lines: list[dict[str, object]] = []
    check_spans(
        cuda, lane, [Span(offset=0, length=65536)],
        lambda kind, **values: lines.append({"kind": kind, **values}),
    )  # fmt: skip
    checks = [line for line in lines if line["kind"] == "check"]
    assert len(checks) == len(Engine)
    for check in checks:
        assert (check["mismatches"], check["first"], check["found"]) == (1, 1024, 0)
        assert check["kind_of_fault"] == "zeros"
        assert check["sample_equal"] is False


def test_a_kernel_that_never_ends_is_a_hang_and_costs_its_deadline_alone() -> None:
    command = [sys.executable, "-m", "tests.deep_gpu_stall"]
    request = DeepRequest(size_bytes=MIB, collective=False, deadlines=Deadlines(step=4.0))
    began = time.monotonic()
    outcome = deep_verify(LocalHost(), request, command=command)
    seconds = time.monotonic() - began
    last = len(outcome.facts.cards) - 1
    stalled = {("copy-push", "ok"), ("copy-pull", "ok"), ("copy-peer", "ok"),
               ("kernel-store", "hang"), ("kernel-load", "inconclusive")}  # fmt: skip
    for judged in outcome.judgement.pairs:
        cards = {card.uuid: card.index for card in outcome.facts.cards}
        if (cards[judged.pair.src], cards[judged.pair.dst]) == (0, last):
            assert {(e.engine.value, e.verdict.value) for e in judged.engines} == stalled
        else:
            assert judged.verified, judged.reason  # by a fresh child, on the same cards
    assert outcome.judgement.healthy is False
    assert seconds < 40
    assert "cannot be killed" not in str(outcome.document)


def test_cuda_names_cards_as_nvml_does() -> None:
    import pynvml

    from gpuguard.deep.cuda_driver import DriverCuda

    pynvml.nvmlInit()
    for card in DriverCuda().cards():
        handle = pynvml.nvmlDeviceGetHandleByIndex(card.ordinal)
        assert card.uuid == pynvml.nvmlDeviceGetUUID(handle)
        assert card.name == pynvml.nvmlDeviceGetName(handle)
        bus_id = pynvml.nvmlDeviceGetPciInfo(handle).busId
        assert normal_bus_id(card.pci_bus_id) == normal_bus_id(bus_id)


def test_one_chosen_card_is_tried_on_its_own_memory() -> None:
    first = deep_verify(LocalHost(), DeepRequest(size_bytes=MIB)).facts.cards[0]
    for name in (first.uuid, first.pci_bus_id, str(first.index)):
        outcome = deep_verify(LocalHost(), DeepRequest(size_bytes=MIB, only=(name,)))
        assert [f.code for f in outcome.judgement.findings] == ["deep-no-pair"]
        (tried,) = outcome.judgement.pairs
        assert (tried.pair.src, tried.verified) == (first.uuid, True)


def test_refuses_beside_a_process_that_computes() -> None:
    program = (
        "from gpuguard.deep.cuda_driver import DriverCuda\n"
        "DriverCuda().allocate(0, 1 << 20); print('ready', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        refused = deep_verify(LocalHost(), DeepRequest(size_bytes=MIB, collective=False))
        beside = deep_verify(
            LocalHost(), DeepRequest(size_bytes=MIB, collective=False, beside_workloads=True)
        )
        other.communicate("\n")
    assert [f.code for f in refused.judgement.findings] == ["deep-refused"]
    assert f"pid {other.pid}" in refused.judgement.findings[0].evidence
    assert beside.judgement.pairs
    assert all(pair.verified for pair in beside.judgement.pairs)


def test_the_all_reduce_on_real_cards() -> None:
    outcome = deep_verify(LocalHost(), DeepRequest(size_bytes=MIB))
    collective = outcome.facts.collective
    if collective is None or collective.problem is not None:
        pytest.skip("needs two cards and NCCL")
    assert collective.with_p2p is not None
    assert (collective.with_p2p.transport or "").startswith("P2P")
    assert collective.without_p2p is not None
    assert (collective.without_p2p.transport or "").startswith("SHM")
    assert outcome.judgement.healthy is True
