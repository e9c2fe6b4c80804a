"""kill -9 between every two file operations of a change of holds: none is ever forgotten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.holds_kit import make_hold_box, needs_tools

HERE = Path(__file__).parent
pytestmark = needs_tools


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "faultshim.so"
    source = str(HERE / "faultshim.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"]
    subprocess.run(command, check=True)
    return library


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("hold", {"old", "new"}),
        ("lift", {"new"}),  # old and new are the same: everything on hold again
        ("unhold", {"old", "new"}),
        ("again", {"new"}),
    ],
)
def test_a_kill_at_any_operation_forgets_no_hold(
    kind: str, ends: set[str], shim: Path, empty_root: Path
) -> None:
    host = make_hold_box(empty_root)
    for name in ("linux-image-amd64", "libnvidia-ml1", "bash"):
        host.install(name)
    host.select(bash="hold")  # somebody else's, in every end
    done = subprocess.run(
        [sys.executable, "-m", "tests.holds_driver", host.root, kind],
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
    assert result["operations"] > 12  # dpkg reads from memory, which is none
    assert {end for end, count in result["ends"].items() if count} == ends, result
