"""What a program prints, and what lies where a file should be, stops nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuguard.errors import ProbeError
from gpuguard.host import LocalHost
from gpuguard.host.decompress import decompressed

_MUCH = 1000  # lines of 100 bytes: more than a pipe holds


@pytest.mark.parametrize("grace", [None, 1.0])
def test_a_byte_that_is_not_utf8_in_the_output(grace: float | None) -> None:
    lines: list[str] = []
    script = f"printf 'a\\nb\\351\\377\\n' >&2; seq -f %099g {_MUCH}; printf 'no newline \\303'"
    LocalHost().run("sh", "-c", script, timeout=20, on_line=lines.append, grace=grace)
    assert lines[:2] == ["a", "b\ufffd\ufffd"]
    assert lines[-2:] == [f"{_MUCH:099}", "no newline \ufffd"]
    assert len(lines) == _MUCH + 3


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_a_regular_file_is_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "nvidia.ko"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(ProbeError) as caught, decompressed(LocalHost(), path):
        pass
    assert str(path) in caught.value.message


def test_a_folder_can_be_entered_by_others_whatever_the_umask_of_root(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        LocalHost(tmp_path).replace_file("/usr/local/share/ours/file", b"x")
    finally:
        os.umask(before)
    for folder in ("usr", "usr/local/share", "usr/local/share/ours"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o755
