"""The whole way, from the command line to the kernels, over a stand-in for NVIDIA's bindings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import nccl_standin
from tests.schema import problems

REPOSITORY = Path(__file__).parents[1]
STANDIN = REPOSITORY / "tests/standin_cuda"

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc"),
    pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has real cards"),
]


@dataclass
class Box:
    """A place for the stand-in's options, and the command line over it."""

    folder: Path
    standin: bool = True

    def __post_init__(self) -> None:
        nccl_standin.build(self.folder)

    def run(
        self, *words: str, cards: int = 2, mirror: str = ""
    ) -> subprocess.CompletedProcess[str]:
        (self.folder / "standin_options.py").write_text(f"CARDS = {cards}\nMIRROR = {mirror!r}\n")
        folders = [self.folder, *([STANDIN] if self.standin else []), REPOSITORY]
        return subprocess.run(
            [sys.executable, "-m", "gpuguard", *words],
            capture_output=True, text=True, check=False, cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        )  # fmt: skip

    def deep(self, *words: str, **more: Any) -> dict[str, Any]:
        """The object ``deep`` of the JSON document."""
        done = self.run("--json", "verify", "--deep", "--size", "1", *words, **more)
        document = json.loads(done.stdout)
        assert problems("verify", document) == []
        answer: dict[str, Any] = document["deep"]
        assert problems("verify-deep", answer) == []
        assert document["proven"] is (answer["healthy"] is True)
        # No driver is loaded here, so the grant is unknown, whatever the bytes say.
        assert done.returncode == (1 if answer["verdict"] == "critical" else 3)
        return answer


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def test_three_cards_are_proven(box: Box) -> None:
    answer = box.deep(cards=3)
    assert answer["healthy"] is True
    assert len(answer["pairs"]) == 6
    collective = answer["collective"]
    assert (collective["p2p_on"]["outcome"], collective["nccl"]) == ("ok", "2.28.99")
    assert [gpu["name"] for gpu in answer["gpus"]] == ["Stand-in"] * 3
    for pair in answer["pairs"]:
        assert (pair["grant"], pair["verified"], pair["reason"]) == ("ok", True, "")
        assert pair["ceiling_bytes_per_second"] is None  # NVML does not know the link
        assert {e["engine"]: e["verdict"] for e in pair["engines"]} == dict.fromkeys(
            ("copy-push", "copy-pull", "copy-peer", "kernel-store", "kernel-load"), "ok"
        )
        assert pair["load_latency_seconds"] > 0


def test_a_mirrored_aperture_is_caught(box: Box) -> None:
    """CASES C14: the card that wrote reads its own memory, and everything looks right to it."""
    answer = box.deep(mirror="0-1")
    assert answer["healthy"] is False
    assert "deep-wrong-data" in [finding["code"] for finding in answer["findings"]]
    there, back = answer["pairs"]
    bad = {e["engine"] for e in there["engines"] if e["verdict"] == "wrong-data"}
    assert bad == {"copy-push", "copy-peer", "kernel-store"}  # what card 0 writes
    bad = {e["engine"] for e in back["engines"] if e["verdict"] == "wrong-data"}
    assert bad == {"copy-pull", "kernel-load"}  # what card 0 reads
    assert "nothing arrived" in there["reason"]


def test_one_card_and_chosen_cards(box: Box) -> None:
    assert [f["code"] for f in box.deep(cards=1)["findings"]] == ["deep-no-pair"]
    answer = box.deep("--gpu", "0000:02:00.0", "--gpu", "0", cards=3)
    assert len(answer["pairs"]) == 2
    assert answer["healthy"] is True


def test_too_little_memory(box: Box) -> None:
    done = box.run("--json", "verify", "--deep", "--size", "128")
    answer = json.loads(done.stdout)["deep"]
    assert done.returncode == 3
    assert [f["code"] for f in answer["findings"]] == ["deep-inconclusive"]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in answer["pairs"][0]["reason"]


def test_what_a_person_sees(box: Box) -> None:
    text = box.run("verify", "--deep", "--size", "1", "--no-all-reduce").stdout
    assert "gpuguard verify --deep: ok, 2 of 2 ordered pairs proven" in text
    assert "GPU0 (0000:01:00.0)  GPU1 (0000:02:00.0)  ok     ok    ok" in text
    assert "compared word for word on the destination card" in text
    bad = box.run("verify", "--deep", "--size", "1", "--no-all-reduce", mirror="1-0").stdout
    assert "0 of 2 ordered pairs proven" in bad
    assert "CRITICAL deep check: the driver grants P2P, and wrong data arrives" in bad


def test_only_what_is_proven_is_accepted(box: Box) -> None:
    text = box.run("verify", "--deep", "--size", "1", "--accept", mirror="0-1").stdout
    assert "nothing: only what is proven can be accepted" in text


def test_options_that_go_with_deep(box: Box) -> None:
    for words in (["--size", "3"], ["--gpu", "0"], ["--beside-workloads"], ["--no-all-reduce"]):
        done = box.run("verify", *words)
        assert (done.returncode, f"{words[0]} goes with --deep" in done.stderr) == (2, True)
    done = box.run("--root", str(box.folder), "verify", "--deep")
    assert done.returncode == 2


def test_without_the_bindings_the_remedy_is_named(box: Box) -> None:
    (box.folder / "cuda").mkdir()
    (box.folder / "cuda/__init__.py").write_text("")  # hides any that are installed
    box.standin = False
    answer = box.deep()
    assert [f["code"] for f in answer["findings"]] == ["deep-not-installed"]
    assert "gpuguard[deep]" in answer["findings"][0]["remedy"]
