"""kill -9 between every two file operations of a set-up: exactly old or exactly new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: A thousand kills with a dozen fsyncs each; what is killed is a process, not the machine.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["setup", "update", "remove"])
def test_a_kill_at_any_operation_ends_old_or_new(kind: str, tmp_path: Path) -> None:
    library = tmp_path / "faultshim.so"
    source = str(HERE / "faultshim.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"]
    subprocess.run(command, check=True)
    with tempfile.TemporaryDirectory(dir=MEMORY) as work:
        done = subprocess.run(
            [sys.executable, "-m", "tests.setup_driver", f"{work}/work", kind],
            env={**os.environ, "LD_PRELOAD": str(library)},
            cwd=HERE.parent, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["problems"] == []
    assert result["operations"] > 50
    assert result["ends"]["old"] > 0
    assert result["ends"]["new"] > 0
