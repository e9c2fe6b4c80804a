"""What holds for every test: shared fixtures, and a look at the machine before and after."""

from __future__ import annotations

import signal

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
    # What is ignored here (under nohup) would be ignored by every program that is sent one, too;
    # a handler is not inherited.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the comparison last, whatever else was asked for."""
    items.sort(key=lambda item: item.path.name == "test_live_machine.py")
