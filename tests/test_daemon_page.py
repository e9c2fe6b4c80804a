"""The daemon's page in a real browser: nothing is refused, nothing fetched, a phone is enough."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.box import Box
from tests.browser import browser
from tests.building import folder_for_others
from tests.daemon_kit import configure, green_host, lose_patch, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with folder_for_others() as folder:
        green_host(folder / "host", cards=8)
        yield folder / "host"


@pytest.fixture
def host(base: Path, tmp_path: Path) -> Box:
    shutil.copytree(base, tmp_path / "host", symlinks=True)
    configure(tmp_path / "host")
    return Box(tmp_path / "host")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("lost", [False, True], ids=["green", "lost"])
def test_the_page(host: Box, tmp_path: Path, width: int, *, lost: bool) -> None:
    if lost:
        lose_patch(host.root)
    with serving(host.root) as served, browser(tmp_path / "profile") as seen:
        served.await_status("critical" if lost else "ok")
        seen.open(f"http://127.0.0.1:{served.port}/", width=width)
        assert "rig-07" in seen.evaluate("document.title")
        # the style sheet is in force: the policy's hash is right
        assert seen.evaluate("getComputedStyle(document.querySelector('.verdict')).borderLeftStyle")
        assert seen.evaluate("document.styleSheets[0].cssRules.length") > 20
        # nothing is wider than the window: who is wider has a scroll bar of its own
        assert seen.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.evaluate("document.querySelectorAll('.matrix tbody td').length") == 64
        word = "critical" if lost else "ok"
        good = seen.evaluate(f"document.querySelectorAll('.matrix td.{word}').length")
        assert good == 56
        fetched = seen.evaluate("performance.getEntriesByType('resource').map(e => e.name)")
        assert [name for name in fetched if not name.endswith("/favicon.ico")] == []
        assert [line for line in seen.said if "favicon" not in line and "404" not in line] == []
        shot = tmp_path / "page.png"
        seen.screenshot(shot)
        content = shot.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert struct.unpack(">I", content[16:20])[0] > width / 2


def test_dark_for_those_who_want_it(host: Box, tmp_path: Path) -> None:
    with serving(host.root) as served, browser(tmp_path / "profile") as seen:
        served.await_status("ok")
        shades = {}
        for scheme in ("light", "dark"):
            feature = [{"name": "prefers-color-scheme", "value": scheme}]
            seen.call("Emulation.setEmulatedMedia", features=feature)
            seen.open(f"http://127.0.0.1:{served.port}/", width=1280)
            shades[scheme] = seen.evaluate("getComputedStyle(document.body).backgroundColor")
        assert shades["light"] != shades["dark"]
