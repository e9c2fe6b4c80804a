"""What ``gpuguard setup`` puts down is what Prometheus and Grafana are told to read."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.box import Box
from tests.monitoring import DASHBOARDS, GRAFANA, PROMETHEUS, REPOSITORY, run

SHARE = "/usr/local/share/gpuguard"
RUNBOOK = REPOSITORY / "docs/alerts.md"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Box:
    """A tree on which the real program was set up."""
    box = Box(tmp_path_factory.mktemp("installed") / "host")
    program = "/opt/gpuguard/bin/gpuguard"
    for folder in ("etc/apt/apt.conf.d", "etc/systemd/system", "opt/gpuguard/bin", "var/lib"):
        (box.root / folder).mkdir(parents=True)
    box.path(program).write_text("#!/bin/sh\n")
    box.path(program).chmod(0o755)
    (box.root / "etc/passwd").write_text("nobody:x:65534:65534::/:/bin/false\n")
    answer = box.json("setup", "--program", program)
    assert answer.status == 0, answer.out + answer.err
    return box


def test_every_file_is_there(host: Box) -> None:
    for folder, target in ((PROMETHEUS, "prometheus"), (GRAFANA, "grafana")):
        for file in folder.rglob("*"):
            if file.is_file():
                placed = host.path(f"{SHARE}/{target}/{file.relative_to(folder)}")
                assert placed.read_bytes() == file.read_bytes(), placed
    assert host.path(f"{SHARE}/prometheus/alerts.md").read_text() == RUNBOOK.read_text()


def test_the_link_in_an_alert_leads_to_the_installed_runbook(host: Box) -> None:
    rules = yaml.safe_load(host.path(f"{SHARE}/prometheus/gpuguard-alerts.rules.yml").read_text())
    link = rules["groups"][0]["rules"][0]["annotations"]["runbook_url"]
    path = link.split("file://")[1].split("{{")[0]
    assert host.path(path).is_file()


def test_prometheus_takes_the_installed_rules(host: Box, tmp_path: Path) -> None:
    """The example as it is, in a Prometheus whose root is the tree: paths are made to fit."""
    text = host.path(f"{SHARE}/prometheus/prometheus.yml.example").read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace(SHARE, str(host.path(SHARE))))
    done = run("promtool", "check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rule files found" in done.stdout


def test_grafana_finds_the_installed_dashboards(host: Box) -> None:
    provider = host.path(f"{SHARE}/grafana/provisioning/dashboards/gpuguard.yaml")
    path = yaml.safe_load(provider.read_text())["providers"][0]["options"]["path"]
    assert sorted(f.name for f in host.path(path).iterdir()) == [f.name for f in DASHBOARDS]


@pytest.mark.slow
def test_a_wheel_has_them(tmp_path: Path) -> None:
    """Links in the repository are files in the package."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: pip install -e '.[dev]'")
    copy = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".cache", ".venv", "__pycache__", "tests")
    shutil.copytree(REPOSITORY, copy, symlinks=True, ignore=ignored)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "out")],
        cwd=copy, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        top = "gpuguard/resources"
        assert archive.read(f"{top}/prometheus/alerts.md") == RUNBOOK.read_bytes()
        names = set(archive.namelist())
    assert f"{top}/prometheus/gpuguard-alerts.rules.yml" in names
    assert {f"{top}/grafana/dashboards/{file.name}" for file in DASHBOARDS} <= names
