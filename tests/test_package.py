"""The wheel: complete, and usable in an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.test_lint import files

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with what is installed: no network is asked."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
            "--no-build-isolation", "--wheel-dir", folder, REPOSITORY,
        ],
        check=True,
    )  # fmt: skip
    (built,) = folder.glob("gpuguard-*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    ours = {str(path) for path in files() if path.parts[0] == "gpuguard"}
    assert sorted(ours - packed) == []
    assert {
        "gpuguard/resources/gpuguard.yaml.example",
        "gpuguard/resources/man/gpuguard.yaml.5",
        "gpuguard/resources/schema/status.schema.json",
        "gpuguard/resources/systemd/gpuguard-rebuild.service",
        "gpuguard/demo/patches/p2p.patch",
        "gpuguard/demo/standin/src/nvidia/Makefile",
    } <= packed


def test_the_wheel_brings_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"gpuguard"}


def test_an_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True
    )
    where = run(tmp_path, "python", "-c", "import gpuguard; print(gpuguard.__file__)")
    assert where.startswith(str(tmp_path / "venv"))
    assert "status" in run(tmp_path, "gpuguard", "--help")
    example = run(tmp_path, "gpuguard", "config", "init", "--stdout")
    assert example == (REPOSITORY / "gpuguard/resources/gpuguard.yaml.example").read_text()
    host = tmp_path / "host/opt/gpuguard/bin"
    host.mkdir(parents=True)
    (host / "gpuguard").touch(mode=0o755)
    arguments = ("--dry-run", "--program", "/opt/gpuguard/bin/gpuguard")
    said = run(tmp_path, "gpuguard", "--root", str(tmp_path / "host"), "setup", *arguments)
    units = {line.rpartition("/")[2] for line in said.splitlines() if "systemd/system/g" in line}
    assert units == {p.name for p in (REPOSITORY / "systemd").iterdir() if p.suffix != ".md"}


def run(folder: Path, program: str, *arguments: str) -> str:
    """Run a program of the new environment; the answer is what it prints.

    Its dependencies come from here; PYTHONPATH runs no .pth file, so the checkout does not.
    """
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": sysconfig.get_path("purelib")}
    argv = [str(folder / "venv/bin" / program), *arguments]
    return subprocess.check_output(argv, cwd=folder, env=environment, text=True)
