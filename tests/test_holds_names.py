"""Names of packages as people have them from dpkg, and what counts as evidence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.holds_kit import LEDGER, HoldBox, make_hold_box, native, needs_tools

pytestmark = needs_tools


@pytest.fixture
def host(empty_root: Path) -> HoldBox:
    """A driver's library, which dpkg prints with its architecture."""
    box = make_hold_box(empty_root)
    box.install("libnvidia-ml1")
    return box


def test_names_as_dpkg_l_prints_them(host: HoldBox) -> None:
    name = f"libnvidia-ml1:{native()}"
    assert host.run("hold", name).status == 0
    assert host.held() == [name]
    assert list(host.ledger()["packages"]) == ["libnvidia-ml1"]
    assert host.run("unhold", name).status == 0
    assert host.held() == []
    assert host.json("hold", "libnvidia-ml1:i386").error["code"] == "package-not-installed"


def test_how_a_package_came_here_is_no_evidence(host: HoldBox) -> None:
    host.run("hold")
    host.apt("apt-mark", "unhold", "libnvidia-ml1")
    ledger = host.ledger()
    ledger["packages"]["libnvidia-ml1"]["since"] = "2999-01-01T00:00:00Z"
    (host.root / LEDGER).write_text(json.dumps(ledger))
    (finding,) = (f for f in host.holds()["findings"] if f["code"] == "hold-drift")
    assert finding["evidence"] == {"libnvidia-ml1": "in no log who did it"}
