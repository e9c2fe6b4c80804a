"""site.yml with a real vLLM on the CPU behind the front. Opt-in: ``make test-vllm``.

The environment that ``tools/make-vllm.sh`` has made is shown to a bare booted Debian at its own
path, read-only, with the interpreter that it belongs to. Minutes, and 3 GB of memory.
"""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import ansible_kit, booted_roots
from tests.ansible_site import Site, bare_site
from tests.kit import cache_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
_FOLDER = cache_folder() / "vllm"
_MODEL = "/srv/tiny"
_START = 500


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    if os.environ.get("GPUGUARD_REAL_VLLM") != "1":
        pytest.skip("opt-in, ten minutes and 3 GB of memory: make test-vllm")
    if not (_FOLDER / "tiny/config.json").exists():
        pytest.skip("the CPU build of vLLM is not there: tools/make-vllm.sh")
    for reason in (ansible_kit.missing(), booted_roots.missing()):
        if reason is not None:
            pytest.skip(reason)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        site = stack.enter_context(bare_site(Path(folder)))
        for path in (_FOLDER / "venv", _interpreter()):
            stack.enter_context(_shown(site.system.root, path))
        shutil.copytree(_FOLDER / "tiny", site.system.path(_MODEL))
        for file in site.system.path(_MODEL).iterdir():
            file.chmod(0o644)  # safetensors writes weights for their owner alone
        site.variables |= {
            "vllm_lanes": {"real": _lane()},
            "vllm_activate": "real",
            "vllm_packages": ["libnuma1", "g++"],
        }
        site.boot()
        yield site


def _interpreter() -> Path:
    """The installation that the environment's Python belongs to."""
    text = (_FOLDER / "venv/pyvenv.cfg").read_text()
    config = configparser.ConfigParser()
    config.read_string(f"[venv]\n{text}")
    return Path(config["venv"]["home"]).parent


@contextmanager
def _shown(root: Path, path: Path) -> Iterator[None]:
    """A folder of the test machine at the same place of a root; everybody may enter it."""
    target = root / path.relative_to("/")
    target.mkdir(parents=True)
    for folder in target.relative_to(root).parents:
        (root / folder).chmod((root / folder).stat().st_mode | 0o111)
    subprocess.run(["mount", "--bind", path, target], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", target], check=True)


def _lane() -> dict[str, Any]:
    return {
        "engine": {"backend": "venv", "venv": str(_FOLDER / "venv"), "gpus": "none"},
        "model": {"path": _MODEL, "served_name": "tiny"},
        "args": {
            "dtype": "bfloat16", "enforce-eager": True, "max-model-len": 2048,
            "max-num-seqs": 4, "shutdown-timeout": 20,
        },
        "env": {"VLLM_CPU_KVCACHE_SPACE": 1, "VLLM_ENGINE_READY_TIMEOUT_S": _START - 20},
        "timeouts": {"first_start": _START, "start": _START, "stop": 40, "drain": 60, "memory": 0},
    }  # fmt: skip


def test_from_bare_to_a_real_engine_that_answers(site: Site) -> None:
    run = site.play()
    said = site.system.journal("-u", "lane-real.service", "-n", "80")
    assert run.returncode == 0, f"{run.output}\n{said}"
    assert site.answers()
    main = site.system.show("lane-real.service", "MainPID")
    owner = site.system.run("ps", "-o", "user=", "-p", main).stdout.strip()
    assert owner == "vllm"


def test_the_second_run_changes_nothing(site: Site) -> None:
    started = site.system.show("lane-real.service", "InvocationID")
    again = site.play()
    assert (again.returncode, again.count("gpu1", "changed")) == (0, 0), again.output
    assert site.system.show("lane-real.service", "InvocationID") == started


def test_its_metrics_are_scraped(site: Site) -> None:
    site.system.wait_for(lambda: site.query('up{job="vllm"}') == {"vllm": 1.0}, 60, "scraped")
    assert site.query("vllm:num_requests_running") == {"vllm": 0.0}
    assert site.query("vllm:generation_tokens_total")["vllm"] > 0


def test_an_alert_fires_when_the_engine_is_killed_and_it_comes_back(site: Site) -> None:
    site.system.wait_for(lambda: "VllmEngineDead" not in site.firing(), 60, "no alert")
    processes = site.system.run("ps", "-eo", "pid=,args=").stdout.splitlines()
    (engine,) = [line.split()[0] for line in processes if "EngineCore" in line]
    site.system.run("kill", "-9", engine)
    site.system.wait_for(lambda: "VllmEngineDead" in site.firing(), 120, "the alert")
    site.system.wait_for(site.answers, _START, "systemd has started it again")
