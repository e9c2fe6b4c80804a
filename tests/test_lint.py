"""The linters, as tests: one command checks everything."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
_NOT_OURS = {
    ".git",
    ".venv",
    ".cache",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "build",
    "dist",
}


def files() -> Iterator[Path]:
    """Every file of the repository, relative to it; caches and environments left out."""
    for folder, folders, names in os.walk(REPOSITORY):
        inside = Path(folder).relative_to(REPOSITORY)
        if inside == Path():
            folders[:] = [name for name in folders if name not in _NOT_OURS]
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (inside / name for name in names)


def is_shell(path: Path) -> bool:
    """True for a script of sh or bash, with or without a suffix."""
    if path.suffix not in ("", ".sh"):
        return False
    with (REPOSITORY / path).open("rb") as file:
        line = file.readline(80)
    return line.startswith(b"#!") and line.split()[-1].endswith(b"sh")


def is_yaml(path: Path) -> bool:
    """True for YAML, the example configuration included."""
    return path.suffix in (".yaml", ".yml") or path.name.endswith(".yaml.example")


def check(*argv: str) -> None:
    """Run a linter in the repository; what it prints is the message of the failure."""
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"


def python_tool(name: str) -> tuple[str, ...]:
    """How to run a linter that is a Python package; skips the test if it is missing."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install -e '.[dev]'")
    return (sys.executable, "-m", name)


def test_ruff_check() -> None:
    check(*python_tool("ruff"), "check", "--no-cache", ".")


def test_ruff_format() -> None:
    check(*python_tool("ruff"), "format", "--no-cache", "--check", ".")


def test_mypy() -> None:
    check(*python_tool("mypy"))


def test_yamllint() -> None:
    check(*python_tool("yamllint"), "--strict", *sorted(map(str, filter(is_yaml, files()))))


def test_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    scripts = sorted(map(str, filter(is_shell, files())))
    assert ".ci/run" in scripts
    check("shellcheck", *scripts)


def test_scripts_can_be_executed() -> None:
    scripts = [path for path in files() if is_shell(path) and path.parts[0] in (".ci", "tools")]
    assert [str(path) for path in scripts if not os.access(REPOSITORY / path, os.X_OK)] == []
