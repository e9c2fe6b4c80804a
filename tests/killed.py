"""Run a driver under ``faultshim.so``, which kills its children before each file operation."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

HERE = Path(__file__).parent


@cache
def _shim() -> str:
    folder = mkdtemp(prefix="faultshim-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = f"{folder}/faultshim.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", library, str(HERE / "faultshim.c"), "-ldl"]
    subprocess.run(command, check=True)
    return library


def run_driver(driver: str, *words: str | Path) -> dict[str, Any]:
    """What ``tests/DRIVER.py`` found: ``operations``, ``ends`` and how often each came."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.{driver}", *words],
        env={**os.environ, "LD_PRELOAD": _shim()},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["problems"] == []
    return result
