"""Decisions about lanes, without I/O: the state machine, the linter, what the engine says."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from gpuguard.core.facts import DriverFacts
from gpuguard.proof import DeepProof, Proof
from gpuguard.serving.front_config import Route, commands, parse_listen, parse_route, render_front
from gpuguard.serving.history import duration_text, expected_seconds
from gpuguard.serving.lane import arguments, lane_document
from gpuguard.serving.lane_file import InvalidLaneError, kept_lane, parse_lane
from gpuguard.serving.machine import Outcome, Role, Step, Switch, advance, interrupt, recover
from gpuguard.serving.nccl_log import variables
from gpuguard.serving.p2p_policy import P2pDecision, Proofs, Tier, decide, tells_transport
from gpuguard.serving.readiness import Glance, lost, waits_for
from gpuguard.serving.reading import (
    block_size,
    fatal_line,
    hangs_in_nccl,
    parse_load,
    pool_tokens,
    transports,
)
from gpuguard.serving.smoke import is_degenerate
from gpuguard.serving.systemd import UnitState, parse_show
from tests.test_lane_lint import make_lane

# --- the state machine


def begin(**changes: Any) -> Switch:
    known = {"switch_id": "1", "kind": "switch", "started": "", "boot_id": "x"}
    return Switch(**{**known, "new": "new-1", "old": "old-1", "chain": ("fb-1", "fb-2"), **changes})


def play(switch: Switch, fails: set[tuple[str, Step]], limit: int = 60) -> list[Switch]:
    """Every state up to the end, when these steps of these lanes fail."""
    states = [switch]
    while switch.step is not Step.DONE:
        failure = "broken" if (switch.target, switch.step) in fails else None
        switch = advance(switch, failure)
        states.append(switch)
        assert len(states) < limit, "it loops"
    return states


def test_all_good() -> None:
    states = play(begin(), set())
    assert [state.step for state in states] == [
        Step.PREFLIGHT, Step.SNAPSHOT, Step.DRAIN, Step.STOP, Step.START, Step.READY,
        Step.IDENTITY, Step.GATE, Step.PROMOTE, Step.DONE,
    ]  # fmt: skip
    assert states[-1].outcome is Outcome.PROMOTED


@pytest.mark.parametrize(
    ("step", "outcome", "target"),
    [
        (Step.PREFLIGHT, Outcome.REFUSED, "new-1"),
        (Step.SNAPSHOT, Outcome.REFUSED, "new-1"),
        (Step.DRAIN, Outcome.REFUSED, "new-1"),
        (Step.STOP, Outcome.FAILED, "new-1"),
        (Step.START, Outcome.ROLLED_BACK, "old-1"),
        (Step.READY, Outcome.ROLLED_BACK, "old-1"),
        (Step.IDENTITY, Outcome.ROLLED_BACK, "old-1"),
        (Step.GATE, Outcome.ROLLED_BACK, "old-1"),
    ],
)
def test_where_a_failure_of_the_new_lane_leads(step: Step, outcome: Outcome, target: str) -> None:
    end = play(begin(), {("new-1", step)})[-1]
    assert (end.outcome, end.target, end.reasons) == (outcome, target, ("new-1: broken",))


def test_a_failed_drain_gives_traffic_back() -> None:
    assert Step.UNDRAIN in [state.step for state in play(begin(), {("new-1", Step.DRAIN)})]


def test_the_whole_chain_in_order_then_the_end() -> None:
    lanes = ("new-1", "old-1", "fb-1", "fb-2")
    fails = {(lane, Step.GATE) for lane in lanes}
    states = play(begin(), fails)
    assert tuple(dict.fromkeys(state.target for state in states)) == lanes
    assert (states[-2].step, states[-1].outcome) == (Step.HALT, Outcome.FAILED)
    assert len(states[-1].reasons) == 4
    end = play(begin(), fails - {("fb-1", Step.GATE)})[-1]
    assert (end.outcome, end.target, end.role) == (Outcome.FELL_BACK, "fb-1", Role.FALLBACK)


def test_a_lane_is_never_tried_twice() -> None:
    switch = begin(old="new-1", chain=("new-1", "fb-1", "fb-1"))
    fails = {(lane, Step.READY) for lane in ("new-1", "fb-1")}
    states = play(switch, fails)
    assert [s.target for s in states if s.step is Step.READY] == ["new-1", "fb-1"]


_FAULTS = [(lane, step) for lane in ("new-1", "old-1") for step in (Step.START, Step.GATE)]


@pytest.mark.parametrize("same_boot", [True, False], ids=["kill -9", "reboot"])
@pytest.mark.parametrize("fails", [set(), *map(set, itertools.combinations(_FAULTS, 2))])
def test_from_every_state_it_comes_to_an_end_however_often_it_dies(
    fails: set[tuple[str, Step]], same_boot: bool
) -> None:
    for state in play(begin(), fails):
        for deaths in range(6):
            switch = state
            for _ in range(deaths):  # dies again as soon as it goes on
                if switch.step is Step.DONE:
                    break
                switch = recover(switch, same_boot=same_boot)
            end = play(switch, fails)[-1]
            assert end.outcome is not None
            if end.outcome is Outcome.PROMOTED:
                assert end.target == "new-1"


def test_what_recovery_decides() -> None:
    for step in (Step.PREFLIGHT, Step.SNAPSHOT):
        assert recover(begin(step=step), same_boot=True).outcome is Outcome.REFUSED
    assert recover(begin(step=Step.DRAIN), same_boot=True).step is Step.UNDRAIN
    ready = begin(step=Step.READY)
    once = recover(ready, same_boot=True)
    assert (once.step, once.target) == (Step.READY, "new-1")
    twice = recover(once, same_boot=True)
    assert (twice.step, twice.target) == (Step.STOP, "old-1")
    rebooted = recover(ready, same_boot=False)
    assert (rebooted.step, rebooted.target, rebooted.role) == (Step.STOP, "old-1", Role.BACK)
    assert recover(begin(step=Step.PROMOTE), same_boot=False).step is Step.PROMOTE


@pytest.mark.parametrize("step", list(Step))
def test_an_interruption_never_promotes_what_was_not_gated(step: Step) -> None:
    end = play(interrupt(begin(step=step)), set())[-1]
    expected = {
        Step.PROMOTE: Outcome.PROMOTED, Step.HALT: Outcome.FAILED, Step.DONE: None,
        Step.PREFLIGHT: Outcome.REFUSED, Step.SNAPSHOT: Outcome.REFUSED,
        Step.DRAIN: Outcome.REFUSED, Step.UNDRAIN: Outcome.REFUSED,
    }  # fmt: skip
    assert end.outcome is expected.get(step, Outcome.ROLLED_BACK)


# --- the file


def test_what_yaml_makes_of_off_and_of_numbers() -> None:
    text = (
        "name: a\nengine: {backend: venv, venv: /opt/v}\nmodel: {path: /m, served_name: m}\n"
        "requires: {p2p: off}\nenv: {A: 1, B: '2'}\nargs: {enable_x: true, y: false, z: [1, 2],"
        " w: {b: 1, a: 2}, max-model-len: 10}\n"
    )
    lane = parse_lane(text, "a.yaml", "a")
    assert (lane.requires.p2p, lane.env) == ("none", {"A": "1", "B": "2"})
    assert arguments(lane) == (
        "--enable-x", "--no-y", "--z", "1", "2", "--w", '{"a":2,"b":1}', "--max-model-len", "10",
    )  # fmt: skip
    reordered = "\n".join(reversed(text.strip().split("\n")))
    assert parse_lane(f"# a comment\n{reordered}\n", "a.yaml").lane_id == lane.lane_id
    assert parse_lane(text.replace("max-model-len: 10", "max-model-len: 11"), "a").sha256 != (
        lane.sha256
    )


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("name: A", "name"),
        ("engine: {backend: venv, image: x@sha256:0}", "engine"),
        ("engine: {backend: compose, venv: /opt/v}", "engine"),
        ("model: {path: relative, served_name: m}", "model.path"),
        ("surprise: 1", "surprise"),
        ("args: {'a b': 1}", "args"),
        ("env: {'A B': x}", "env"),
        ("port: 80", "port"),
        ("args: {max-model-len: 1e999}", "args.max-model-len"),
        ("args: {max-model-len: .inf}", "args.max-model-len"),
        ("args: {max-model-len: .nan}", "args.max-model-len"),
        ("args: {max-model-len: 0}", "args.max-model-len"),
        ("args: {max-model-len: 2048.5}", "args.max-model-len"),
        ("args: {max-model-len: 99999999999999999999}", "args.max-model-len"),
        ("args: {tensor-parallel-size: 0.5}", "args.tensor-parallel-size"),
        ("args: {tensor-parallel-size: 0}", "args.tensor-parallel-size"),
        ("args: {tensor-parallel-size: -4}", "args.tensor-parallel-size"),
        ("args: {tensor-parallel-size: true}", "args.tensor-parallel-size"),
        ("args: {block-size: many}", "args.block-size"),
        ("args: {max-num-seqs: [1]}", "args.max-num-seqs"),
        ("args: {shutdown-timeout: -1}", "args.shutdown-timeout"),
        ("gate: {canary: [{prompt: x, expect: '('}]}", "gate.canary[0]"),
        ("engine: {backend: venv, venv: /v, patches: [{file: abc}]}", "engine.patches[0].sha256"),
    ],
)
def test_what_is_no_lane(line: str, key: str) -> None:
    good = {
        "name": "name: a", "engine": "engine: {backend: venv, venv: /opt/v}",
        "model": "model: {path: /m, served_name: m}",
    }  # fmt: skip
    lines = {**good, line.split(":", maxsplit=1)[0]: line}
    with pytest.raises(InvalidLaneError) as caught:
        parse_lane("\n".join(lines.values()), "a.yaml")
    assert key in [problem.key for problem in caught.value.problems]


# --- P2P


GRANT = Proof(
    boot_id="b", created="then", verdict="ok", kernel="6.1", driver="580.1", build_id="id",
    identity="patched", cards=("a", "b", "c", "d"), pairs=12, source="nvml",
)  # fmt: skip
DEEP = DeepProof(
    boot_id="b", created="later", kernel="6.1", driver="580.1", build_id="id",
    cards=("a", "b", "c", "d"), pairs=12, all_reduce=True, problem=None, is_fault=False,
)  # fmt: skip
PROVEN = Proofs(grant=GRANT, deep=DEEP)


def decided(p2p: str, proofs: Proofs, proof: str = "bytes") -> P2pDecision:
    lane = make_lane(requires={"p2p": p2p, "proof": proof})
    return decide(lane, proofs, "6.1", DriverFacts(loaded="580.1", loaded_build_id="id"))


@pytest.mark.parametrize("proof", ["bytes", "grant"])
@pytest.mark.parametrize(
    "grant",
    [None, replace(GRANT, kernel="6.2"), replace(GRANT, driver="580.2"),
     replace(GRANT, build_id="other"), replace(GRANT, cards=("a", "b"))],
    ids=["none", "kernel", "driver", "build", "cards"],
)  # fmt: skip
def test_without_a_grant_nothing_is_proven(grant: Proof | None, proof: str) -> None:
    proofs = replace(PROVEN, grant=grant)
    refused = decided("required", proofs, proof)
    assert (refused.refusal is None, refused.tier) == (False, Tier.NONE)
    assert refused.gap is not None
    assert not refused.gap.is_provable  # bytes do not stand in for it
    careful = decided("preferred", proofs, proof)
    assert (careful.refusal, careful.environment) == (None, {"NCCL_P2P_DISABLE": "1"})
    assert careful.note is not None


@pytest.mark.parametrize(
    ("deep", "provable", "tried"),
    [
        (None, True, False),
        (replace(DEEP, kernel="6.2"), True, False),
        (replace(DEEP, driver="580.2"), True, False),
        (replace(DEEP, build_id="other"), True, False),
        (replace(DEEP, cards=("a", "b", "c", "e")), True, True),
        (replace(DEEP, problem="out of memory"), True, True),
        (replace(DEEP, problem="wrong data (a -> b)", is_fault=True), False, False),
        (replace(DEEP, problem="wrong data", is_fault=True, cards=("a", "b")), False, False),
    ],
    ids=["none", "kernel", "driver", "build", "cards", "tried", "fault", "fault of two"],
)
def test_without_bytes_a_grant_is_a_word(
    deep: DeepProof | None, provable: bool, tried: bool
) -> None:
    proofs = replace(PROVEN, deep=deep)
    refused = decided("required", proofs)
    assert refused.gap is not None
    assert (refused.gap.is_provable, refused.gap.was_tried) == (provable, tried)
    assert (refused.refusal, refused.tier) == (refused.gap.problem, Tier.GRANT)
    assert decided("preferred", proofs).environment == {"NCCL_P2P_DISABLE": "1"}
    taken = decided("required", proofs, "grant")
    assert (taken.refusal, taken.environment, taken.tier) == (None, {}, Tier.GRANT)


def test_what_both_proofs_are_worth() -> None:
    for p2p in ("required", "preferred"):
        good = decided(p2p, PROVEN)
        assert (good.environment, good.refusal, good.note, good.tier) == ({}, None, None, "bytes")
    off = decided("none", PROVEN)
    assert (off.environment, off.refusal, off.note) == ({"NCCL_P2P_DISABLE": "1"}, None, None)
    unread = decided("required", Proofs(grant_problem="it is not believed", deep=DEEP))
    assert unread.refusal == "it is not believed"


def test_what_nccl_is_asked_to_write_down() -> None:
    lane = make_lane()
    for backend, place in (("venv", "/var/cache/gpuguard/lanes/"), ("quadlet", "/cache/")):
        engine = {"backend": backend} | ({"image": None, "venv": "/v"} if backend == "venv" else {})
        asked = variables(make_lane(engine=engine))
        assert asked["NCCL_DEBUG"] == "INFO"
        assert asked["NCCL_DEBUG_FILE"].startswith(place)
    own = replace(lane, env={"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_SUBSYS": "all"})
    assert (variables(own), tells_transport(own)) == ({}, True)
    assert variables(make_lane(args={"tensor-parallel-size": 1})) == {}
    assert variables(make_lane(requires={"p2p": "none"})) == {}


def test_what_was_kept_before_there_was_a_choice_meant_the_grant() -> None:
    values = lane_document(make_lane())
    assert kept_lane(values, "kept", "int4-1").requires.proof == "bytes"
    del values["requires"]["proof"]
    assert kept_lane(values, "kept", "int4-1").requires.proof == "grant"


# --- what the engine says

POOL = (
    "GPU KV cache size: 1,944,081 tokens, Maximum concurrency for 220,000 tokens per request: 8.84x"
)


def test_logs_and_metrics() -> None:
    assert pool_tokens("", [POOL]) == 1944081
    assert pool_tokens("", ["GPU KV cache size: 1,041,901 tokens", "Maximum concurrency …"]) == (
        1041901
    )
    info = 'vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="77"} 1.0\n'
    assert pool_tokens(f"x 1\n{info}", [POOL]) == 77
    assert pool_tokens("", ["nothing"]) is None
    assert block_size(["Setting attention block size to 1600 tokens to ensure that …"]) == 1600
    assert hangs_in_nccl(["a", "(Worker) INFO vLLM is using nccl==2.27.3", ""])
    assert not hangs_in_nccl(["vLLM is using nccl==2.27.3", "Loading weights took 1 seconds"])
    assert fatal_line(["ok", " No available memory for the cache blocks. Try "]) is not None
    channel = "box:7:7 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1]"
    lines = [f"{channel} via SHM/direct/direct", f"{channel} via P2P/CUMEM", "sent via NET"]
    assert transports(lines) == {"SHM", "P2P"}
    assert transports([f"{channel} [send] via NET/Socket/0"]) == {"NET"}
    load = parse_load(
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        'vllm:num_requests_waiting{engine="0"} 0.0\n'
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0\n'
    )
    assert (load.running, load.waiting, load.is_idle) == (4.0, 0.0, False)
    assert parse_load("nothing").is_idle is False  # could not look is not idle


@pytest.mark.parametrize(
    ("text", "expected"),
    [("!!!!!!!!!!!!!!!!", True), ("! ! ! ! ! ! ! ! ! ! ! !", True), ("four, five", False),
     ("!!!", False), ("\ufffd" * 20, False)],
)  # fmt: skip
def test_one_character_without_end(text: str, expected: bool) -> None:
    assert is_degenerate(text) is expected


def test_the_eta() -> None:
    history = [
        {"starts": [{"lane": "a-1", "first": True, "seconds": 600.0}]},
        {"starts": [{"lane": "a-1", "first": False, "seconds": s} for s in (300.0, 310.0, 500.0)]},
        {"starts": [{"lane": "b-1", "first": False, "seconds": 5.0}]},
        {},
    ]
    assert expected_seconds(history, "a-1", first=False) == 310.0
    assert expected_seconds(history, "a-1", first=True) == 600.0
    assert expected_seconds(history, "a-2", first=True) == 600.0  # changed: as its name before
    assert expected_seconds(history, "c-1", first=True) is None
    assert (duration_text(45.2), duration_text(390)) == ("45 s", "6 min 30 s")


# --- the front


@pytest.mark.parametrize("route", [Route(18001, is_open=True), Route(18002, is_open=False)])
def test_the_front_says_what_was_written(route: Route) -> None:
    text = render_front("127.0.0.1:8000", 30, route)
    assert parse_route(text) == route
    assert parse_listen(text) == "127.0.0.1:8000"
    told = " ".join(commands(route))
    assert ("state ready" in told) is route.is_open


def test_a_unit_that_nothing_starts_is_given_up_soon() -> None:
    lane = make_lane()
    unit = UnitState(name="lane-int4.service", load="not-found", active="inactive", sub="dead")
    glance = Glance(unit=unit, lines=(), quiet=9.0, stopped=1.0)
    assert lost(lane, glance) is None
    assert "not-found" in (lost(lane, replace(glance, stopped=6.0)) or "")
    coming = replace(unit, load="loaded", active="activating")
    assert lost(lane, replace(glance, unit=coming, stopped=6.0)) is None
    queued = parse_show("lane-int4.service", "LoadState=loaded\nActiveState=inactive\nJob=139\n")
    assert not queued.is_stopped
    assert lost(lane, replace(glance, unit=queued, stopped=6.0)) is None
    assert "waits for units before it" in waits_for(replace(glance, unit=queued))
