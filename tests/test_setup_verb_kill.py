"""kill -9 between every two file operations of a set-up: exactly old or exactly new."""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.killed import run_driver

#: A thousand kills with a dozen fsyncs each; what is killed is a process, not the machine.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["setup", "update", "remove"])
def test_a_kill_at_any_operation_ends_old_or_new(kind: str) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as work:
        result = run_driver("setup_driver", f"{work}/work", kind)
    assert result["operations"] > 50
    assert result["ends"]["old"] > 0
    assert result["ends"]["new"] > 0
