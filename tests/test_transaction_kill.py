"""kill -9 between every two file operations of a commit: exactly old or exactly new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "faultshim.so"
    source = str(HERE / "faultshim.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"]
    subprocess.run(command, check=True)
    return library


@pytest.mark.parametrize("kind", ["install", "replace", "rollback"])
def test_a_kill_at_any_operation_ends_old_or_new(kind: str, shim: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.commit_driver", tmp_path, kind],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["problems"] == []
    assert result["operations"] > 50
    assert result["ends"]["old"] > 0
    assert result["ends"]["new"] > 0
