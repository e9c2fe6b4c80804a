"""The child's protocol and its supervision: real processes over cards of bytes with faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpuguard.core.deep import DeepVerdict
from gpuguard.core.deep_facts import CollectiveOutcome, Engine
from gpuguard.core.findings import Verdict
from gpuguard.deep.baseline import BASELINE_FILE
from gpuguard.errors import StateError, UsageError
from gpuguard.host import LocalHost
from gpuguard.verbs.deep import deep_verify
from tests.deep_kit import check_deep, codes, fake_child, look, verdicts
from tests.trees import make_tree

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in child is a module of the tests."""
    monkeypatch.setattr(sys, "path", [str(REPOSITORY), *sys.path])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_tree(tmp_path, {"proc/cpuinfo": "flags : fpu\n"})
    return tmp_path


def test_two_good_cards(root: Path) -> None:
    steps: list[str] = []
    outcome = check_deep(root, fake_child(2), progress=steps.append)
    assert outcome.judgement.healthy is True
    assert outcome.judgement.verdict is Verdict.OK
    assert "copy-push, GPU-0 -> GPU-1" in steps
    for judged in outcome.judgement.pairs:
        assert judged.ceiling.link == "PCIe 5.0 x16"
        assert {rate.engine for rate in judged.pair.rates} == set(Engine)
        assert judged.pair.load_latency_seconds == pytest.approx(1e-6)
    collective = outcome.facts.collective
    assert collective is not None
    assert collective.with_p2p is not None
    assert collective.with_p2p.transport == "P2P/direct pointer"
    assert outcome.facts.virtualised is None


FAULTS = {
    "mirror": ("wrong-data", "nothing arrived"),
    "zeros": ("wrong-data", "zeros"),
    "nan": ("wrong-data", "NaN"),
    "lost": ("wrong-data", "nothing arrived"),
    "page": ("wrong-data", "nothing arrived"),  # what should lie in the first page lies behind it
    "bit": ("wrong-data", "1 words are wrong, the first at byte 40000"),
    "crash": ("transfer-error", "CUDA_ERROR_ILLEGAL_ADDRESS"),
    "die": ("inconclusive", "the child ended early"),
}


@pytest.mark.parametrize("engine", ["copy", "kernel"])
@pytest.mark.parametrize("kind", FAULTS)
def test_one_bad_direction(root: Path, kind: str, engine: str) -> None:
    fault = {"kind": kind, "src": 0, "dst": 1, "engine": engine}
    outcome = check_deep(root, fake_child(2, [fault]), request={"collective": False})
    verdict, reason = FAULTS[kind]
    assert verdicts(outcome.judgement) == {"0-1": DeepVerdict(verdict), "1-0": DeepVerdict.OK}
    assert codes(outcome.judgement) == [f"deep-{verdict}"]
    assert reason in outcome.judgement.pairs[0].reason
    assert outcome.judgement.healthy is (None if kind == "die" else False)
    hit = [e for e in outcome.judgement.pairs[0].engines if e.verdict is DeepVerdict(verdict)]
    if verdict == "wrong-data":
        assert {e.engine.is_kernel for e in hit} == {engine == "kernel"}


def test_a_mirror_passes_every_round_trip_and_is_caught(root: Path) -> None:
    """C14: what was written reads back right through the same aperture, at line rate."""
    from tests.deep_fake import FakeCuda, Fault

    cuda = FakeCuda(2, [Fault("mirror")])
    cuda.allocate(0, 4096)
    far = cuda.allocate(1, 4096)
    cuda.fill(0, far, 4096, 7)
    assert cuda.compare(0, far, 4096, 7).mismatches == 0  # a round trip sees nothing wrong
    outcome = check_deep(root, fake_child(2, [{"kind": "mirror"}]))
    assert outcome.judgement.healthy is False
    assert set(verdicts(outcome.judgement).values()) == {DeepVerdict.WRONG_DATA}


def test_a_hang_is_named_and_the_other_pairs_are_tried(root: Path) -> None:
    fault = {"kind": "hang", "src": 0, "dst": 1, "engine": "kernel"}
    began = time.monotonic()
    outcome = check_deep(root, fake_child(3, [fault]), request={"collective": False})
    assert time.monotonic() - began < 20
    found = verdicts(outcome.judgement)
    assert found.pop("0-1") is DeepVerdict.HANG
    assert set(found.values()) == {DeepVerdict.OK}
    assert codes(outcome.judgement) == ["deep-hang"]
    assert "kernel-store" in outcome.judgement.pairs[0].reason
    assert _children() == []


def test_too_fast_for_the_link(root: Path) -> None:
    child = fake_child(3, rates={"0-1": 128e9, "1-2": 14.3e9})
    outcome = check_deep(root, child)
    bad = [pair for pair, v in verdicts(outcome.judgement).items() if v is DeepVerdict.IMPLAUSIBLE]
    assert bad == ["0-1"]
    assert outcome.judgement.healthy is False


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_what_says_nothing_about_the_link(root: Path, kind: str) -> None:
    outcome = check_deep(root, fake_child(2, [{"kind": kind, "src": 0}]))
    assert verdicts(outcome.judgement)["0-1"] is DeepVerdict.INCONCLUSIVE


def test_no_grant(root: Path) -> None:
    outcome = check_deep(root, fake_child(2, [{"kind": "refused"}]))
    assert codes(outcome.judgement) == ["deep-no-grant"]
    assert outcome.judgement.healthy is False
    assert outcome.facts.collective is None


def test_one_card(root: Path) -> None:
    outcome = check_deep(root, fake_child(1))
    assert codes(outcome.judgement) == ["deep-no-pair"]
    assert outcome.judgement.healthy is None
    assert outcome.document["pairs"] == []
    assert outcome.document["self_tests"][0]["verified"] is True


def test_chosen_cards(root: Path) -> None:
    outcome = check_deep(root, fake_child(4), request={"only": ("1", "0000:04:00.0")})
    assert set(verdicts(outcome.judgement)) == {"1-3", "3-1"}
    assert outcome.judgement.healthy is True
    nobody = check_deep(root, fake_child(2), request={"only": ("7",)})
    assert codes(nobody.judgement) == ["deep-unavailable"]


def test_a_card_that_cuda_does_not_see(root: Path) -> None:
    outcome = check_deep(root, fake_child(2, look=look(3)), request={"collective": False})
    assert len(outcome.judgement.pairs) == 6
    assert outcome.judgement.healthy is None
    assert codes(outcome.judgement) == ["deep-inconclusive"]


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ({"on": "hang"}, "collective-hang"),
        ({"on": "wrong-data"}, "collective-wrong-data"),
        ({"on": "error", "off": "error"}, "collective-inconclusive"),
        ({"via": "SHM/direct"}, "collective-inconclusive"),
    ],
)
def test_the_all_reduce(root: Path, options: dict[str, str], verdict: str) -> None:
    outcome = check_deep(root, fake_child(2, collective=options))
    assert codes(outcome.judgement) == [verdict]


def test_no_nccl(root: Path) -> None:
    outcome = check_deep(root, fake_child(2, collective={"off": "missing"}))
    assert outcome.judgement.healthy is True
    assert outcome.facts.collective is not None
    assert outcome.facts.collective.with_p2p is None


def test_a_hanging_start(root: Path) -> None:
    line = json.dumps({"kind": "step", "name": "look", "engine": None})
    program = f"import time; print({line!r}, flush=True); time.sleep(600)"
    sleeper = [sys.executable, "-c", program]
    from gpuguard.deep.supervise import Deadlines

    outcome = check_deep(root, sleeper, request={"deadlines": Deadlines(look=0.5)})
    assert codes(outcome.judgement) == ["deep-hang-at-start"]
    assert outcome.judgement.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[1]", "null", '{"kind": "grant"}', '{"kind": "check", "pair": ["a", "b"]}',
        '{"kind": "pair-end", "pair": ["GPU-0", "GPU-1"]}', '{"kind": "cards", "cards": 7}',
        "Traceback (most recent call last):", "\x00\xff", '{"kind": "end"}',
    ],
)  # fmt: skip
def test_nonsense_is_no_proof(root: Path, text: str) -> None:
    child = [sys.executable, "-c", f"import sys; sys.stdout.write({text!r})"]
    outcome = check_deep(root, child)
    assert outcome.judgement.healthy is None
    assert codes(outcome.judgement) == ["deep-unavailable"]


def test_refuses_beside_compute_processes(root: Path) -> None:
    (root / "proc/4711/fd").mkdir(parents=True)
    (root / "proc/4711/comm").write_text("python3\n")
    child = fake_child(2, look=look(2, processes=[{"pid": 4711, "uuid": "GPU-0"}]))
    refused = check_deep(root, child)
    assert codes(refused.judgement) == ["deep-refused"]
    assert refused.judgement.findings[0].evidence == {"pid 4711": "python3 (nvml)"}
    assert refused.judgement.healthy is None
    assert refused.judgement.pairs == ()
    beside = check_deep(root, child, request={"beside_workloads": True})
    assert beside.judgement.healthy is True
    assert beside.document["workloads"][0]["name"] == "python3"


def test_holders_of_the_memory_device_compute(root: Path) -> None:
    for pid, name, target in [
        (10, "vllm", "/dev/nvidia-uvm"),
        (11, "Xorg", "/dev/nvidia0"),
        (12, "nvidia-persiste", "/dev/nvidia-uvm"),
    ]:
        (root / f"proc/{pid}/fd").mkdir(parents=True)
        (root / f"proc/{pid}/comm").write_text(f"{name}\n")
        (root / f"proc/{pid}/fd/3").symlink_to(target)
    outcome = check_deep(root, fake_child(2))
    assert [w.name for w in outcome.facts.workloads] == ["vllm"]
    assert codes(outcome.judgement) == ["deep-refused"]


def test_accept_then_regress(root: Path) -> None:
    file = root / BASELINE_FILE.lstrip("/")
    bad = check_deep(root, fake_child(2, [{"kind": "zeros"}]), accept=True)
    assert (bad.asked, bad.accepted, file.exists()) == (True, False, False)
    good = check_deep(root, fake_child(2), accept=True)
    assert good.accepted
    slow = check_deep(root, fake_child(2, rates={"0-1": 10e9}))
    assert codes(slow.judgement) == ["bandwidth-regressed"]
    assert slow.judgement.verdict is Verdict.WARNING
    again = check_deep(root, fake_child(2, rates={"0-1": 10e9}), accept=True)
    assert again.accepted
    assert check_deep(root, fake_child(2, rates={"0-1": 10e9})).judgement.findings == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2, "pairs": []}', '{"schema": 1}'])
def test_a_damaged_baseline_is_no_baseline(root: Path, text: str) -> None:
    make_tree(root, {BASELINE_FILE.lstrip("/"): text})
    with pytest.raises(StateError):
        check_deep(root, fake_child(2))
    assert check_deep(root, fake_child(2), accept=True).accepted


def test_bytes_are_moved_on_the_running_system_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        deep_verify(LocalHost(tmp_path))


def test_the_real_child_without_a_card() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a card")
    request: dict[str, Any] = {"mode": "pairs", "pairs": None, "only": [], "spans": []}
    for mode in ("look", "pairs", "collective"):
        text = json.dumps({**request, "mode": mode, "cards": [], "length": 8})
        done = subprocess.run(
            [sys.executable, "-m", "gpuguard.deep.child", text],
            capture_output=True, text=True, check=True, cwd=REPOSITORY,
        )  # fmt: skip
        assert done.stderr == ""
        first, said, *_ = [json.loads(line) for line in done.stdout.split("\n") if line]
        assert first["kind"] == "step"
        assert said["kind"] == {"pairs": "unavailable"}.get(mode, mode)
        assert said.get("outcome") in {"collective": ("missing", "error")}.get(mode, (None,))


def test_the_outcome_of_a_collective_is_one_of_those_known() -> None:
    assert {o.value for o in CollectiveOutcome} == {"ok", "wrong-data", "hang", "error"}


def _children() -> list[str]:
    """Processes of the stand-in child that are left."""
    mine = str(os.getpid())
    done = subprocess.run(
        ["ps", "-e", "-o", "ppid=,args="], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if "tests.deep_fake" in line]
    return [line for line in lines if line.split()[0] == mine]
