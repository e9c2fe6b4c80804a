"""`gpuguard demo`, as a person runs it: as root and as an ordinary user."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuguard.demo.headers import HeadersCache
from gpuguard.demo.kernels import link_tree
from gpuguard.demo.scenario import prepare_folder
from gpuguard.errors import UsageError
from tests.unprivileged import public_dir

REPO = Path(__file__).parent.parent
NOBODY = 65534


def _play(
    folder: Path, *interpreter: str, packages: Path = REPO, keep: bool = False
) -> subprocess.CompletedProcess[str]:
    program = interpreter or (sys.executable,)
    command = [*program, "-m", "gpuguard", "demo", "--dir", str(folder)]
    return subprocess.run(
        [*command, "--keep"] if keep else command,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(packages), "HOME": str(folder)},
        text=True,
        capture_output=True,
        timeout=900,
        check=False,
    )


def _with_headers(folder: Path, headers: HeadersCache) -> Path:
    prepare_folder(folder)
    link_tree(headers.root, folder / "headers")
    return folder


def test_the_story_goes_as_told(kernel_headers: HeadersCache) -> None:
    with public_dir() as place:  # the build user must be able to enter it
        folder = _with_headers(place / "demo", kernel_headers)
        done = _play(folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not (folder / "host").exists()
    verdicts = re.findall(r"gpuguard: (ok|warning|unknown|critical)$", done.stdout, re.MULTILINE)
    assert verdicts == ["ok", "critical", "critical", "ok", "ok", "ok", "critical", "ok"]
    assert "12 of 12 ordered pairs OK" in done.stdout
    assert "0 of 12 ordered pairs OK" in done.stdout  # the look ahead, and after the rollback
    assert "core objects: cached" in done.stdout
    assert "\x1b" not in done.stdout  # no colour into a pipe


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_an_ordinary_user_may_watch_it_too(kernel_headers: HeadersCache) -> None:
    # The interpreter of this run may lie in root's home: the system's own, then, with
    # gpuguard installed where everyone can read it.
    system = Path("/usr/bin/python3")
    with public_dir() as place:
        packages = place / "packages"
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--target",
            str(packages),
            str(REPO),
        ]
        subprocess.run(install, check=True)
        folder = place / "demo"
        prepare_folder(folder)
        # a copy: what is linked to the cache would change its owner there, too
        shutil.copytree(kernel_headers.root, folder / "headers", symlinks=True)
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", folder], check=True)
        user = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--")
        done = _play(folder, *user, str(system), packages=packages, keep=True)
        assert done.returncode == 0, done.stdout + done.stderr
        owners = {path.lstat().st_uid for path in (folder / "host").rglob("*")}
    assert owners == {NOBODY}


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host/precious").write_text("mine")
    with pytest.raises(UsageError, match="holds other things"):
        prepare_folder(tmp_path)
    assert (tmp_path / "host/precious").read_text() == "mine"


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UsageError, match="not yours"):
        prepare_folder(tmp_path / "link")
