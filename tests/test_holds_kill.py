"""kill -9 between every two file operations of a change of holds: none is ever forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.holds_kit import make_hold_box, needs_tools
from tests.killed import run_driver

pytestmark = needs_tools


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
    kind: str, ends: set[str], empty_root: Path
) -> None:
    host = make_hold_box(empty_root)
    for name in ("linux-image-amd64", "libnvidia-ml1", "bash"):
        host.install(name)
    host.select(bash="hold")  # somebody else's, in every end
    result = run_driver("holds_driver", host.root, kind)
    assert result["operations"] >= 14  # dpkg reads from memory, which is none
    assert {end for end, count in result["ends"].items() if count} == ends, result
