"""kill -9 between every two file operations of a commit: exactly old or exactly new."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.killed import run_driver


@pytest.mark.parametrize("kind", ["install", "replace", "rollback"])
def test_a_kill_at_any_operation_ends_old_or_new(kind: str, tmp_path: Path) -> None:
    result = run_driver("commit_driver", tmp_path, kind)
    assert result["operations"] > 50
    assert result["ends"]["old"] > 0
    assert result["ends"]["new"] > 0
