"""The last test: nothing that ran before it has touched the machine itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import live


def test_no_test_changed_this_machine(pytestconfig: pytest.Config) -> None:
    assert live.differences(pytestconfig.stash[live.BEFORE], live.snapshot()) == []


def test_the_look_sees_every_kind_of_change(tmp_path: Path) -> None:
    for name in ("kept", "gone", "grown"):
        (tmp_path / name).write_text("x")
    before = live.snapshot((str(tmp_path),))
    (tmp_path / "gone").unlink()
    (tmp_path / "grown").write_text("xx")
    (tmp_path / "new").symlink_to("/nowhere")
    assert live.differences(before, live.snapshot((str(tmp_path),))) == [
        f"changed: {tmp_path}",
        f"changed: {tmp_path}/grown",
        f"made: {tmp_path}/new",
        f"removed: {tmp_path}/gone",
    ]
