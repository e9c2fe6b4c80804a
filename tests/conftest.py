"""What holds for every test: shared fixtures, and a look at the machine before and after."""

from __future__ import annotations

import pytest

from tests import live

pytest_plugins = [
    "tests.kit",
    "tests.building",
    "tests.box",
    "tests.initramfs_tool",
    "tests.windowbox",
    "tests.lanekit",
]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember the machine as it is before the first test."""
    session.config.stash[live.BEFORE] = live.snapshot()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the comparison last, whatever else was asked for."""
    items.sort(key=lambda item: item.path.name == "test_live_machine.py")
