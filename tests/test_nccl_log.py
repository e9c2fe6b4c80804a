"""NCCL's own files are in a folder that the engine's account can write: read with care."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuguard.host import LocalHost
from gpuguard.serving import nccl_log
from tests.test_lane_lint import make_lane

LINE = "box:7:7 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "var/cache/gpuguard/lanes" / make_lane().lane_id
    place.mkdir(parents=True)
    (place / "nccl.box.7.log").write_text(f"{LINE}\n")
    return place


def test_what_every_process_wrote_is_read_and_forgotten(tmp_path: Path, folder: Path) -> None:
    (folder / "nccl.box.8.log").write_bytes(b"half a \xff line")
    (folder / "compiled.log").write_text("of somebody else\n")
    host = LocalHost(tmp_path)
    assert nccl_log.lines(host, make_lane()) == (LINE, "half a \ufffd line")
    nccl_log.forget(host, make_lane())
    assert nccl_log.lines(host, make_lane()) == ()
    assert [path.name for path in folder.iterdir()] == ["compiled.log"]


def test_what_lies_there_instead_of_a_file_is_no_trap(tmp_path: Path, folder: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{LINE} and more\n")
    (folder / "nccl.link.log").symlink_to(secret)
    os.mkfifo(folder / "nccl.pipe.log")  # opened by a reader, it would wait for ever
    (folder / "nccl.folder.log").mkdir()
    host = LocalHost(tmp_path)
    assert nccl_log.lines(host, make_lane()) == (LINE,)
    nccl_log.forget(host, make_lane())
    assert secret.exists()
    assert [path.name for path in folder.iterdir()] == ["nccl.folder.log"]
