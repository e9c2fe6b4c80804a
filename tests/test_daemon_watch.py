"""What the daemon takes for news: inotify on real folders."""

from __future__ import annotations

import select
from pathlib import Path

from gpuguard.daemon.watch import Watch

_SOON = 10.0


def news(watch: Watch) -> bool:
    """Wait for an event, and say whether one counted."""
    assert watch.descriptor is not None
    ready, _, _ = select.select([watch.descriptor], [], [], _SOON)
    assert ready, "no event at all"
    return watch.has_news()


def test_a_file_is_made_replaced_removed(tmp_path: Path) -> None:
    watch = Watch()
    watch.follow([tmp_path])
    assert not watch.has_news()
    file = tmp_path / "last-run.json"
    file.write_text("{}")
    assert news(watch)
    (tmp_path / "other").write_text("{}")
    assert news(watch)
    (tmp_path / "other").rename(file)
    assert news(watch)
    file.unlink()
    assert news(watch)
    assert not watch.has_news()
    watch.close()


def test_locks_and_halves_are_no_news(tmp_path: Path) -> None:
    watch = Watch()
    watch.follow([tmp_path])
    for name in ("lock", "probe.lock", "lock-frontend", ".x.abc.gpuguard-new"):
        (tmp_path / name).touch()
        assert not news(watch)
    watch.close()


def test_a_folder_that_comes_later(tmp_path: Path) -> None:
    watch = Watch()
    folder = tmp_path / "gpuguard"
    watch.follow([folder])
    (tmp_path / "something-else").mkdir()
    assert not news(watch)
    folder.mkdir()
    assert news(watch)
    watch.follow([folder])
    (folder / "gate.json").touch()
    assert news(watch)
    watch.close()


def test_a_parent_that_is_watched_itself_stays_so(tmp_path: Path) -> None:
    watch = Watch()
    watch.follow([tmp_path, tmp_path / "not-there"])
    (tmp_path / "file").touch()
    assert news(watch)
    watch.close()


def test_nothing_there_at_all(tmp_path: Path) -> None:
    watch = Watch()
    watch.follow([tmp_path / "a/b/c"])
    assert not watch.has_news()
    watch.close()
    assert not watch.has_news()
