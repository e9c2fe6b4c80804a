"""A full disk at every stage, on small file systems: the host as before, nothing left over."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuguard.apply.recovery import recover
from gpuguard.errors import GpuguardError
from gpuguard.host import LocalHost
from tests import commit_driver, toys
from tests.box import K2, SOURCE, Box
from tests.building import needs_root, small_disk

pytestmark = needs_root
_STEP = 4 << 10  # a block


def refused(box: Box, *words: str) -> tuple[int, str, str]:
    before = box.snapshot()
    answer = box.json("rebuild", "--kernel", K2, *words)
    assert box.snapshot() == before
    assert box.leftovers() == []
    assert "MiB" in answer.error["message"] or answer.status == 74
    assert answer.error["hint"]
    return answer.status, answer.error["code"], answer.error["message"]


@contextmanager
def small(folder: Path, size: str) -> Iterator[None]:
    """A small file system with what is in a folder now."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder.parent / f".{folder.name}-kept"
    shutil.copytree(folder, kept, symlinks=True)
    try:
        with small_disk(folder, size):
            shutil.copytree(kept, folder, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(kept)
            yield
    finally:
        shutil.rmtree(kept, ignore_errors=True)


@pytest.mark.parametrize(
    ("place", "size"),
    [
        ("var/cache/gpuguard", "1m"),  # staging and core objects
        (f"lib/modules/{K2}", "1m"),
        ("var/lib/gpuguard", "512k"),  # backups, undo, journal
    ],
)
def test_room_is_looked_at_before_it_is_needed(box: Box, place: str, size: str) -> None:
    with small(box.root / place, size):
        status, code, message = refused(box)
    assert (status, code) == (69, "disk-space")
    assert f"/{place}" in message


@pytest.mark.parametrize("where", ["staging", "log"])
def test_a_disk_that_fills_up_during_the_build(box: Box, where: str) -> None:
    makefile = box.root / SOURCE / "kernel-open/Makefile"
    fill = "head -c 60M /dev/zero > filler" if where == "staging" else "yes 'a line' | head -c 9M"
    makefile.write_text(makefile.read_text().replace("modules:\n", f"modules:\n\t@{fill}\n"))
    place, size = {
        "staging": ("var/cache/gpuguard", "40m"),
        "log": ("var/log/gpuguard", "1m"),
    }[where]
    with small(box.root / place, size):
        status, code, _ = refused(box)
        assert (status, code) == (74, "disk-full")
    assert not (box.root / "var/lib/gpuguard/failures").exists()  # not the inputs' fault
    makefile.write_text(makefile.read_text().replace(f"\t@{fill}\n", ""))
    box.rebuilt("--kernel", K2)


def test_no_room_at_all_for_our_state(box: Box) -> None:
    with small(box.root / "var/lib/gpuguard", "64k"):
        subprocess.run(["dd", "if=/dev/zero", f"of={box.root}/var/lib/gpuguard/filler", "bs=4k"],
                       stderr=subprocess.DEVNULL, check=False)  # fmt: skip
        before = box.snapshot()
        answer = box.json("rebuild", "--kernel", K2)
        assert answer.status in (69, 74)
        assert box.snapshot() == before


def commit_with_room(root: Path, change: Callable[[], None], filler: Path, room: int) -> str:
    """Carry out a change with so much room on the disk: "done", or the code of its error."""
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    filler.write_bytes(bytes(max(free - room, 0)))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "done"
        try:
            change()
        except GpuguardError as error:
            said = error.code
        except BaseException as error:  # noqa: BLE001 - a child must not go on as the test run
            said = f"unexpected: {error!r}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("kind", ["install", "replace", "rollback"])
def test_a_disk_that_is_full_at_any_point_of_the_commit(kind: str, tmp_path: Path) -> None:
    before, built = tmp_path / "before", tmp_path / "built"
    commit_driver.make_root(before)
    for seed in ("patched", "newer"):
        for name in toys.NAMES:
            given = {"name": name, "release": commit_driver.RELEASE, "seed": f"{seed} {name}"}
            toys.toy_module(built / seed / f"{name}.ko", **given)  # type: ignore[arg-type]
    if kind != "install":
        commit_driver.change(before, "install", built)
    old = toys.snapshot(before)
    disk = tmp_path / "disk"
    disk.mkdir()
    root, filler = disk / "root", disk / "filler"
    codes = set()
    with small_disk(disk, "16m"):
        room = 0
        while "done" not in codes:
            shutil.copytree(before, root, symlinks=True)
            said = commit_with_room(
                root, lambda: commit_driver.change(root, kind, built), filler, room
            )
            codes.add(said)
            if said == "rollback-failed":  # then the journal stays, and the next start does it
                filler.unlink()
                assert recover(LocalHost(root)) is not None
            if said != "done":
                assert toys.snapshot(root) == old, (room, said)
                assert not (root / "var/lib/gpuguard/journal.jsonl").exists(), (room, said)
            shutil.rmtree(root)
            filler.unlink(missing_ok=True)
            room += _STEP
            assert room < 4 << 20
    told = {"done", "backup-failed", "journal-unwritable", "disk-full", "depmod-failed"}
    # To put removed files back takes room again; check_room lets no such rollback begin.
    assert codes <= told | ({"rollback-failed"} if kind == "rollback" else set())
    assert len(codes) >= 3


def test_a_rollback_without_room_is_refused(box: Box) -> None:
    box.rebuilt("--kernel", K2)
    before = box.snapshot()
    with small(box.root / "var/lib/gpuguard", "600k"):
        answer = box.json("rollback", "--kernel", K2)
    assert (answer.status, answer.error["code"]) == (69, "disk-space")
    assert box.snapshot() == before
    assert box.run("rollback", "--kernel", K2).status == 0
