"""What the folder of the lanes may hold besides lanes, and what is said of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuguard.host import LocalHost
from gpuguard.serving import store
from gpuguard.serving.lane import lane_adapter
from gpuguard.serving.store import Active, Release
from tests.box import Box

LANE: dict[str, Any] = {
    "name": "a",
    "engine": {"backend": "venv", "venv": "/opt/vllm", "gpus": "none"},
    "model": {"path": "/srv/m", "served_name": "m"},
    "args": {"shutdown-timeout": 100},
}
NAME_RULE = "lower-case letters, digits and dashes"


class Lanes(Box):
    """A tree with a folder for lanes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.folder = root / "etc/gpuguard/lanes"
        self.folder.mkdir(parents=True)

    def write(self, file_name: str, text: str = "", **changes: Any) -> Path:
        file = self.folder / file_name
        file.write_text(text or yaml.safe_dump({**LANE, **changes}))
        return file

    def problems(self, text: str) -> list[str]:
        """What is wrong with lane a, as validate says it."""
        self.write("a.yaml", text)
        answer = self.json("lane", "validate", "a")
        assert answer.status == 78
        error = answer.document["lanes"][0]["error"]
        assert error["code"] == "lane-invalid"
        return [line.partition(": ")[2] for line in error["detail"].splitlines()]

    def error(self, name: str) -> dict[str, str]:
        """The error of one lane that validate reports."""
        answer = self.json("lane", "validate", name)
        assert answer.status == 78
        return dict(answer.document["lanes"][0]["error"])


@pytest.fixture
def lanes(empty_root: Path) -> Lanes:
    return Lanes(empty_root)


def test_a_pipe_is_no_lane_and_nobody_waits_for_a_writer(lanes: Lanes) -> None:
    os.mkfifo(lanes.folder / "pipe.yaml")
    error = lanes.error("pipe")
    assert error["code"] == "lane-unreadable"
    assert "is not a regular file" in error["message"]
    assert "rm /etc/gpuguard/lanes/pipe.yaml" in error["hint"]
    (row,) = lanes.json("lane", "list").document["lanes"]
    assert (row["name"], row["lane_id"]) == ("pipe", None)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a device: run as root")
def test_a_device_is_no_lane(lanes: Lanes) -> None:
    os.mknod(lanes.folder / "zero.yaml", 0o600 | 0o020000, os.makedev(1, 5))
    assert lanes.error("zero")["code"] == "lane-unreadable"


def test_a_link_to_nothing_is_named(lanes: Lanes) -> None:
    (lanes.folder / "dang.yaml").symlink_to("/srv/gone.yaml")
    error = lanes.error("dang")
    assert (error["code"], "/srv/gone.yaml" in error["message"]) == ("lane-unreadable", True)


def test_files_that_are_no_lanes_because_of_their_names_are_said(lanes: Lanes) -> None:
    lanes.write("a.yaml")
    strangers = ["Foo.yaml", "Lane Ö.yaml", "foo.yml"]
    for name in (*strangers, ".hidden.yaml", "README", "b.yaml.candidate"):
        lanes.write(name)
    paths = [f"/etc/gpuguard/lanes/{name}" for name in strangers]
    for verb in ("list", "validate"):
        document = lanes.json("lane", verb).document
        assert document["ignored"] == paths
        assert [lane["name"] for lane in document["lanes"]] == ["a"]
        said = lanes.run("lane", verb).err.splitlines()
        assert [line.split(" is not read")[0] for line in said] == [
            f"warning: {path}" for path in paths
        ]
    assert lanes.json("lane", "validate", "a").document["ignored"] == []


def test_without_lanes_both_verbs_say_so(lanes: Lanes) -> None:
    for verb in ("list", "validate"):
        answer = lanes.run("lane", verb)
        assert (answer.status, answer.out.startswith("no lanes yet")) == (0, True)


ARGUMENT = "text, a number, true or false, a list of texts and numbers, or a mapping"
GOOD = yaml.safe_dump(LANE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "modle: 1\n", "modle: unknown key; did you mean model?"),
        (GOOD + "served_nam: m\n", "served_nam: unknown key; did you mean model.served_name?"),
        (GOOD + "gate: {sekonds: 1}\n", "gate.sekonds: unknown key; did you mean gate.seconds?"),
        (
            GOOD + "gate: {canary: [{promt: x, prompt: x, expect: x}]}\n",
            "gate.canary[0].promt: unknown key; did you mean gate.canary[0].prompt?",
        ),
        (GOOD + "port: many\n", "port: must be a whole number (got 'many')"),
        (GOOD + "port: 80\n", "port: must be greater than or equal to 1024 (got 80)"),
        (GOOD + "timeouts: 3\n", "timeouts: must be a mapping of keys, not 3"),
        (GOOD.replace("venv: /opt/vllm", "venv: opt"),
         "engine.venv: must be an absolute path (got 'opt')"),
        (GOOD.replace("backend: venv", "backend: quadlet"),
         "engine: backend quadlet needs image, and takes no venv"),
        (GOOD.replace("backend: venv", "backend: docker"),
         "engine.backend: must be 'venv', 'quadlet' or 'compose' (got 'docker')"),
        (GOOD.replace("  shutdown-timeout: 100", "  seed:"),
         f"args.seed: must be {ARGUMENT}"),
        (GOOD.replace("  served_name: m\n", ""), "model.served_name: required key is missing"),
    ],
)  # fmt: skip
def test_words_are_those_of_the_configuration(lanes: Lanes, text: str, said: str) -> None:
    assert lanes.problems(text) == [said]


def test_validate_goes_on_after_a_broken_one_and_says_each_remedy(lanes: Lanes) -> None:
    lanes.write("a.yaml")
    lanes.write("wrong.yaml", "name: wrong\n")
    lanes.write("open.yaml", name="open").chmod(0o666)
    answer = lanes.run("lane", "validate", "wrong", "none", "open", "./x.yaml", "a")
    assert (answer.status, "a: ok" in answer.out) == (78, True)
    said = answer.err
    assert "[lane-invalid]" in said
    assert "-> correct the file" in said
    assert "[lane-missing]" in said
    assert "-> there are: a, open, wrong" in said
    assert "by its absolute path" in said
    if os.geteuid() == 0:
        assert "chmod go-w /etc/gpuguard/lanes/open.yaml" in said
        listed = lanes.json("lane", "validate").document["lanes"]
        error = next(one["error"] for one in listed if one["name"] == "open")
        assert set(error) == {"code", "message", "hint", "detail"}
        assert (error["code"], "chmod go-w" in error["hint"]) == ("lane-untrusted", True)


@pytest.mark.skipif(os.geteuid() != 0, reason="writes the records of root: run as root")
def test_the_active_lane_is_listed_without_its_file(lanes: Lanes) -> None:
    host = LocalHost(lanes.root)
    lane = lane_adapter().validate_python(LANE)
    store.write_release(host, Release(lane, ()), anew=True)
    store.write_active(host, Active(lane_id=lane.lane_id, last_good=lane.lane_id))
    lanes.write("b.yaml", name="b")
    a, b = sorted(lanes.json("lane", "list").document["lanes"], key=lambda row: str(row["name"]))
    assert (a["name"], a["lane_id"], a["state"], a["model"]) == ("a", lane.lane_id, "active", "m")
    assert "/etc/gpuguard/lanes/a.yaml is gone" in a["problem"]
    assert (b["state"], b["problem"]) == ("", None)
    shown = lanes.run("lane", "list")
    assert (lane.lane_id in shown.out, "a.yaml is gone" in shown.err) == (True, True)
    notices = lanes.json("lane", "status").document["notices"]
    remedy = next(n["remedy"] for n in notices if n["code"] == "lane-edited")
    assert remedy.startswith("put /etc/gpuguard/lanes/a.yaml back")
    assert "switch to another lane" in remedy
    assert "takes the change over" not in remedy
    lanes.write("a.yaml", port=2000)
    notices = lanes.json("lane", "status").document["notices"]
    assert "takes the change over" in json.dumps(notices)


@pytest.mark.parametrize("name", ["UP", "a.b", "../x", "-x", "x" * 32])
def test_init_gives_the_rule_of_names(lanes: Lanes, name: str) -> None:
    answer = lanes.json("lane", "init", "--preset", "int4", "--", name)
    assert (answer.status, NAME_RULE in answer.error["hint"]) == (2, True)


def test_init_without_such_a_preset_tells_how_to_choose_one(lanes: Lanes) -> None:
    answer = lanes.json("lane", "init", "nope")
    assert (answer.status, "--preset" in answer.error["hint"]) == (2, True)


def test_a_manifest_wants_a_folder_that_it_can_write(lanes: Lanes) -> None:
    file = lanes.root / "srv/m/weights"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"weights")
    said = lanes.run("lane", "manifest", "/srv/m/weights").err
    assert ("is not a folder" in said, "[model-missing]" in said, "->" in said) == (True,) * 3
    assert "no such folder" in lanes.run("lane", "manifest", "/srv/none").err
    assert "-> give an absolute path" in lanes.run("lane", "manifest", "srv").err
    if os.geteuid() == 0:
        said = lanes.run("lane", "manifest", "/srv/m", user="nobody").err
        assert ("cannot be written" in said, "-> run as root" in said) == (True, True)
        assert "hashing" not in said
    assert lanes.run("lane", "manifest", "/srv/m").status == 0
