"""The files made from a lane: golden texts, and what systemd's own tools say of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuguard.serving.front_setup import OUR_UNITS
from gpuguard.serving.lane import Lane
from gpuguard.serving.lane_file import parse_lane
from gpuguard.serving.render import RenderedFile, command, inner_command, render, unit_word
from tests.kit import cache_folder
from tests.realroot import Lab

GOLDEN = Path(__file__).parent / "golden/lanes"
PROGRAM = ("/usr/local/bin/gpuguard",)
FILES = resources.files("gpuguard").joinpath("resources/lanes")
DIGEST = "ab" * 32


def preset(name: str) -> str:
    text = FILES.joinpath(f"{name}.yaml").read_text()
    return text.replace("0" * 64, DIGEST)


def lane_for(backend: str) -> Lane:
    """int4 for each backend, with an argument that every kind of quoting would break."""
    text = preset("int4").replace("backend: quadlet", f"backend: {backend}")
    if backend == "venv":
        text = re.sub(r"\n  image: .*", "\n  venv: /opt/vllm", text)
    awkward = '  override-generation-config: {"a": "x $HOME 100% \\\\ \'q\'"}\n'
    text = text.replace("env:\n", "env:\n  DOLLAR: a $HOME 5% b\n")
    return parse_lane(text.replace("args:\n", f"args:\n{awkward}"), "int4.yaml")


@pytest.mark.parametrize("backend", ["venv", "quadlet", "compose"])
def test_the_files_are_as_agreed(backend: str) -> None:
    for file in render(lane_for(backend), PROGRAM):
        golden = GOLDEN / f"{backend}-{Path(file.path).name}"
        if os.environ.get("GPUGUARD_WRITE_GOLDEN"):
            golden.write_text(f"# {file.path}\n{file.text}")
        assert f"# {file.path}\n{file.text}" == golden.read_text(), golden


@pytest.mark.parametrize("name", ["int4", "fp8", "bf16", "dense27b"])
def test_every_preset_is_a_lane(name: str) -> None:
    lane = parse_lane(preset(name), f"{name}.yaml", name)
    assert render(lane, PROGRAM)
    for patch in lane.engine.patches:
        assert patch.what and patch.why and patch.upstream and patch.drop_when  # noqa: PT018


@pytest.mark.parametrize("backend", ["venv", "compose"])
def test_systemd_finds_nothing_wrong_with_the_units(backend: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    unit = render(lane_for(backend), ("/bin/true",))[-1]
    text = unit.text.replace("/opt/vllm/bin/vllm", "/bin/true").replace("User=vllm", "User=root")
    text = text.replace("/usr/bin/docker", "/bin/true")
    analyze(tmp_path, Path(unit.path).name, text)


@pytest.mark.parametrize("name", OUR_UNITS)
def test_systemd_finds_nothing_wrong_with_the_units_around(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    for unit in OUR_UNITS:  # the path names its service
        text = FILES.joinpath(unit).read_text().replace("@PROGRAM@", "/bin/true")
        (tmp_path / unit).write_text(text.replace("/usr/sbin/haproxy", "/bin/true"))
    analyze(tmp_path, name, (tmp_path / name).read_text())


def analyze(folder: Path, name: str, text: str) -> None:
    """``systemd-analyze verify``; a gate that is not installed here is not the unit's fault."""
    (folder / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", folder / name],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if name in line]
    assert (complaints, done.returncode) == ([], 0), done.stderr


def test_words_arrive_as_they_are(tmp_path: Path) -> None:
    words = ["plain", "two words", 'a"b', "$HOME", "100%", "back\\slash", "it's", ""]
    line = " ".join(map(unit_word, words))
    # systemd's syntax for these is a subset of the shell's once %% and $$ are undone
    assert [w.replace("%%", "%").replace("$$", "$") for w in shlex.split(line)] == words
    assert tmp_path.exists()


def by_name(files: tuple[RenderedFile, ...], end: str) -> str:
    return next(file.text for file in files if file.path.endswith(end))


def test_all_three_say_the_same() -> None:
    quadlet = by_name(render(lane_for("quadlet"), PROGRAM), ".container")
    compose = render(lane_for("compose"), PROGRAM)
    unit, project = by_name(compose, ".service"), yaml.safe_load(by_name(compose, ".yaml"))
    venv = by_name(render(lane_for("venv"), PROGRAM), ".service")
    for text in (quadlet, unit, venv):
        values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        assert values["Restart"] == "always"  # an engine that died leaves with status 0
        assert values["KillMode"] == "mixed"
        assert float(values["TimeoutStartSec"]) >= 1860
        assert float(values["TimeoutStopSec"]) == 170
        assert "gpuguard-verify.service" in values["After"]
        assert "lane prepare int4" in text
    service: dict[str, Any] = project["services"]["vllm"]
    assert service["pull_policy"] == "never"
    assert service["stop_grace_period"] == "150s"
    assert "--pull=never" in quadlet
    assert "--stop-timeout=150" in quadlet
    wanted = command(lane_for("venv"))[2:]
    inner = [word.replace("$$", "$") for word in service["command"]]
    assert inner[-len(wanted) + 7 :] == list(wanted[7:])
    assert json.loads(inner[inner.index("--override-generation-config") + 1]) == {
        "a": "x $HOME 100% \\ 'q'"
    }


def quadlet() -> Path:
    """The generator of an installed Podman, else Debian 13's, unpacked into the cache."""
    own = Path("/usr/libexec/podman/quadlet")
    if own.exists():
        return own
    folder = cache_folder() / "podman-trixie"
    if not folder.exists():
        lab = Lab(cache_folder() / "apt-trixie", release="trixie")
        try:
            if not (lab.folder / "parts/lab.list").exists():
                lab.update()
            try:
                deb = lab.download("podman")[0]
            except subprocess.CalledProcessError:  # lists that are days old
                lab.update()
                deb = lab.download("podman")[0]
            subprocess.run(["dpkg-deb", "-x", deb, f"{folder}.new"], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no Podman 4.4 or newer, and none to be had: {error}")
        Path(f"{folder}.new").rename(folder)
    return folder / "usr/libexec/podman/quadlet"


@pytest.mark.slow
def test_quadlets_own_generator_makes_the_unit_that_is_meant(tmp_path: Path) -> None:
    lane = lane_for("quadlet")
    file = render(lane, PROGRAM)[0]
    (tmp_path / Path(file.path).name).write_text(file.text)
    done = subprocess.run(
        [quadlet(), "--dryrun"], env={**os.environ, "QUADLET_UNIT_DIRS": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "---lane-int4.service---" in done.stdout) == (0, True), done.stderr
    values = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert (values["Restart"], values["KillMode"], values["TimeoutStopSec"]) == (
        "always", "mixed", "170",
    )  # fmt: skip
    words = [w.replace("%%", "%").replace("$$", "$") for w in shlex.split(values["ExecStart"])]
    image = words.index(str(lane.engine.image))
    assert words[image + 1 :] == list(inner_command(lane))
    assert {"--pull=never", "--ipc=host", "--log-driver=passthrough"} <= set(words)
    assert words[words.index("--env-file") + 1] == "/run/gpuguard/lanes/int4.env"
    assert f"DOLLAR={lane.env['DOLLAR']}" in words
    (health,) = [word for word in words if word.startswith("--health-cmd=")]
    assert shlex.split(health.removeprefix("--health-cmd="))[:2] == ["python3", "-c"]


@pytest.mark.parametrize("backend", ["venv", "quadlet", "compose"])
def test_what_gpuguard_sets_is_not_set_by_a_lane(backend: str) -> None:
    lane = lane_for(backend)
    own = {**lane.env, "NCCL_P2P_DISABLE": "0", "VLLM_CACHE_ROOT": "/elsewhere"}
    for file in render(replace(lane, env=own), PROGRAM):
        assert "NCCL_P2P_DISABLE" not in file.text
        assert "/elsewhere" not in file.text
