"""The first hour with lanes: set-up, presets, trees, and what a shell offers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpuguard.cli.lane_complete import PRESETS
from tests.box import REPOSITORY, Box

HAPROXY = "usr/sbin/haproxy"
PROGRAM = "opt/gpuguard/bin/gpuguard"
LANE = """\
name: NAME
engine: {backend: venv, venv: /opt/v, gpus: none}
model: {path: /srv/m, served_name: m}
args: {shutdown-timeout: 5}
requires: {p2p: none}
"""


def put_program(box: Box, path: str) -> None:
    file = box.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)


def put_lane(box: Box, name: str) -> None:
    file = box.root / f"etc/gpuguard/lanes/{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(LANE.replace("NAME", name))


def record_setup(box: Box) -> None:
    file = box.root / "var/lib/gpuguard/setup.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": 1, "created": "", "program": f"/{PROGRAM}", "account": None, "files": []}
    file.write_text(json.dumps(document))


def test_a_front_without_its_proxy_is_said_at_once(box: Box) -> None:
    put_program(box, PROGRAM)
    words = ("lane", "setup", "--program", f"/{PROGRAM}")
    said = box.run(*words, "-n")
    assert "apt-get install haproxy" in said.err
    assert "haproxy" in box.json(*words).document["notes"][0]
    put_program(box, HAPROXY)
    assert box.json(*words).document["notes"] == []
    assert "haproxy" not in box.run(*words).err


def test_units_of_a_tree_call_the_program_that_it_names_or_recorded(box: Box) -> None:
    put_lane(box, "a")
    show = ("lane", "show", "a", "--rendered")
    assert "setup-program-missing" in box.run(*show).err
    put_program(box, PROGRAM)
    record_setup(box)
    assert f"/{PROGRAM} lane prepare a" in box.run(*show).out
    assert box.json("lane", "setup", "-n").status == 0
    assert box.run("lane", "setup").status == 0
    unit = box.root / "etc/systemd/system/gpuguard-lane.service"
    assert f"ExecStart=/{PROGRAM} lane resume" in unit.read_text()
    assert box.run("lane", "setup", "--program", "/opt/none").status == 2


@pytest.mark.parametrize("preset", PRESETS)
def test_fallbacks_that_are_not_there_are_said_with_the_file(box: Box, preset: str) -> None:
    file = box.root / f"etc/gpuguard/lanes/{preset}.yaml"
    said = box.run("lane", "init", preset)
    assert said.status == 0, said.err
    fallbacks = yaml.safe_load(file.read_text()).get("fallback", [])
    assert all(name in said.err for name in fallbacks)
    assert bool(fallbacks) == ("fallback names" in said.err)
    for name in fallbacks:
        put_lane(box, name)
    file.unlink()
    assert box.json("lane", "init", preset).document["fallback_missing"] == []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("lane switch ", ["alpha", "beta"]),
        ("lane show b", ["beta"]),
        ("lane validate alpha b", ["beta"]),
        ("lane init ", sorted(PRESETS)),
        ("lane init x --preset d", ["dense27b"]),
        ("lane switch zz", []),
    ],
)
def test_a_shell_offers_lanes_and_presets(box: Box, line: str, offered: list[str]) -> None:
    put_lane(box, "alpha")
    put_lane(box, "beta")
    assert complete(box.root, line) == offered


def test_a_shell_offers_nothing_where_lanes_cannot_be_listed(box: Box) -> None:
    folder = box.root / "etc/gpuguard/lanes"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("no folder\n")
    assert complete(box.root, "lane switch ") == []
    assert complete(Path("/nonexistent"), "lane switch ") == []


def complete(root: Path, line: str) -> list[str]:
    """What bash would get, through the script that ``gpuguard setup`` installs."""
    words = f"gpuguard --root {root} {line}"
    last = len(words.split(" ")) - 1
    code = "from gpuguard.__main__ import main; import sys; sys.argv[0] = 'gpuguard'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COMP_WORDS": words,
             "COMP_CWORD": str(last), "_GPUGUARD_COMPLETE": "complete_bash"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return sorted(done.stdout.split())
