"""What ``verify --deep`` leaves as this boot's proof: made by a whole check, ended by any fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuguard.host import LocalHost
from gpuguard.proof import DeepProof, read_deep_proof
from tests.deep_kit import QUICK, check_deep, fake_child, look

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root records it: run as root")
ZEROS = [{"kind": "zeros", "src": 0, "dst": 1}]
HANG = [{"kind": "hang", "src": 1, "dst": 0}]
NO_MEMORY = [{"kind": "memory"}]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("this-boot\n")
    return tmp_path


def deep(
    root: Path,
    faults: Sequence[Mapping[str, Any]] = (),
    *,
    request: Mapping[str, Any] | None = None,
    cards: int = 2,
    **child: Any,
) -> DeepProof | None:
    """Check, and read what is on record afterwards."""
    check_deep(root, fake_child(cards, faults, **child), request=request)
    return read_deep_proof(LocalHost(root))


def test_a_whole_check_is_the_proof(root: Path) -> None:
    proof = deep(root)
    assert proof is not None
    assert (proof.problem, proof.is_fault, proof.all_reduce, proof.pairs) == (None, False, True, 2)
    assert (proof.boot_id, proof.cards) == ("this-boot", ("GPU-0", "GPU-1"))


def test_of_another_boot_it_is_none(root: Path) -> None:
    assert deep(root) is not None
    (root / "proc/sys/kernel/random/boot_id").write_text("another\n")
    assert read_deep_proof(LocalHost(root)) is None


@pytest.mark.parametrize(
    ("faults", "child", "is_fault", "said"),
    [
        (ZEROS, {}, True, "wrong data arrives (GPU0 (0000:01:00.0) -> GPU1 (0000:02:00.0)"),
        (HANG, {}, True, "a transfer never ends (GPU1 (0000:02:00.0) -> GPU0"),
        ([{"kind": "refused"}], {}, True, "grants no peer access"),
        (NO_MEMORY, {}, False, "could not be told whether data arrives"),
        ((), {"collective": {"on": "wrong-data"}}, True, "wrong sums"),
        ((), {"collective": {"on": "hang"}}, True, "an all-reduce hangs"),
        ((), {"collective": {"via": "SHM/direct/direct"}}, False, "did not use P2P"),
        ((), {"collective": {"on": "missing", "off": "missing"}}, False, "no all-reduce was tried"),
    ],
    ids=["data", "hang", "refused", "memory", "sums", "nccl hangs", "host memory", "no nccl"],
)
def test_what_is_no_proof_says_why(
    root: Path,
    faults: Sequence[Mapping[str, Any]],
    child: Mapping[str, Any],
    is_fault: bool,
    said: str,
) -> None:
    assert deep(root) is not None
    proof = deep(root, faults, **child)  # takes the earlier one away
    assert proof is not None
    assert proof.is_fault is is_fault
    assert said in (proof.problem or "")


def test_a_check_of_a_part_adds_nothing_and_ends_it_by_a_fault(root: Path) -> None:
    part = {"only": ("0", "1")}
    assert deep(root, request=part) is None
    assert deep(root, request={"collective": False}) is None
    whole = deep(root, cards=3)
    assert whole is not None
    assert deep(root, request=part, cards=3) == whole
    assert deep(root, NO_MEMORY, request=part, cards=3) == whole
    ended = deep(root, ZEROS, request=part, cards=3)
    assert ended is not None
    assert (ended.is_fault, ended.cards) == (True, ("GPU-0", "GPU-1"))


def test_where_nothing_was_moved_nothing_is_said(root: Path) -> None:
    whole = deep(root)
    busy = look(2, processes=[{"pid": 1, "uuid": "GPU-0"}])
    assert deep(root, look=busy) == whole


def test_broken_off_it_leaves_no_old_proof(root: Path) -> None:
    assert deep(root) is not None

    sent: list[str] = []

    def interrupt(step: str) -> None:
        if "GPU-1" in step and not sent:
            sent.append(step)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        check_deep(root, fake_child(2, HANG), progress=interrupt)
    assert read_deep_proof(LocalHost(root)) is None


def test_one_limit_for_all_of_it(root: Path) -> None:
    limits = {name: getattr(QUICK, name) for name in ("start", "look", "step", "collective")}
    slow = type(QUICK)(**{**limits, "step": 30.0, "total": 3.0})
    proof = deep(root, HANG, request={"deadlines": slow})
    assert proof is not None
    assert proof.is_fault is False
    assert "not through within 3 s" in (proof.problem or "")
