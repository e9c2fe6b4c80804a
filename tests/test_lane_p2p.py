"""Which cards a lane lies on, and whether P2P is shown between all of them. No I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuguard.core.facts import DriverFacts
from gpuguard.proof import Proof
from gpuguard.serving.nccl_log import variables
from gpuguard.serving.p2p_policy import P2pDecision, decide
from gpuguard.serving.readiness import Evidence, identity_problem
from gpuguard.serving.systemd import UnitState
from tests.test_lane_core import GRANT, PROVEN
from tests.test_lane_lint import make_lane

ONE_CARD_EACH = {"tensor-parallel-size": 1}


def decided(grant: Proof, **args: Any) -> P2pDecision:
    lane = make_lane(requires={"p2p": "required"}, args=args)
    proofs = replace(PROVEN, grant=grant)
    return decide(lane, proofs, "6.1", DriverFacts(loaded="580.1", loaded_build_id="id"))


@pytest.mark.parametrize(
    "grant",
    [
        replace(GRANT, pairs=4, visible=4, together=2),
        replace(GRANT, pairs=6, visible=4, together=3),
        replace(
            GRANT, pairs=12, visible=5, together=1
        ),  # the first card that CUDA shows is excluded
        replace(GRANT, pairs=4),  # of a gpuguard that counted pairs alone
    ],
    ids=["groups", "three", "excluded", "before"],
)
def test_a_grant_must_be_between_all_cards_of_the_lane(grant: Proof) -> None:
    refused = decided(grant)
    assert refused.gap is not None
    assert f"granted over {grant.pairs} ordered pairs of 4 cards" in str(refused.refusal)
    assert "p2p.groups" in refused.gap.remedy
    assert not refused.gap.is_provable


def test_a_lane_on_cards_that_reach_each_other_counts_them_as_the_proof_does() -> None:
    two = decided(replace(GRANT, pairs=4, visible=4, together=2), **{"tensor-parallel-size": 2})
    assert (two.refusal, two.environment) == (None, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    for all_of_them in (replace(GRANT, visible=4, together=4), GRANT):
        assert decided(all_of_them).environment == {}
        assert decided(all_of_them).refusal is None
    one = decided(replace(GRANT, pairs=0, visible=4, together=1), **ONE_CARD_EACH)
    assert (one.refusal, one.environment) == (None, {})


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline-parallel-size": 4},
        {"data-parallel-size": 4, "enable-expert-parallel": True},
        {"prefill-context-parallel-size": 2},
    ],
)
@pytest.mark.parametrize(
    ("via", "problem"),
    [("P2P/CUMEM", None), ("SHM/direct/direct", "NCCL goes via SHM"), (None, "cannot be seen")],
)
def test_every_way_to_lie_on_several_cards_shows_its_transport(
    parallel: dict[str, Any], via: str | None, problem: str | None
) -> None:
    lane = make_lane(args={**ONE_CARD_EACH, **parallel})
    assert variables(lane)["NCCL_DEBUG"] == "INFO"
    channel = f"box:7:7 [0] NCCL INFO Channel 00/1 : 0[0] -> 1[1] via {via}"
    seen = Evidence(
        unit=UnitState(name=lane.unit, load="loaded", active="active", sub="running"),
        altered=(), command=None, expected_command=None, metrics="", lines=(), version=None,
        nccl=() if via is None else (channel,),
    )  # fmt: skip
    found = identity_problem(lane, seen)
    assert found is None if problem is None else problem in str(found)
