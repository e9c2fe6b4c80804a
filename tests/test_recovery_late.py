"""Recovery that comes late: what apt, DKMS or a person has done since the crash stays."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import gpuguard.apply.execute
from gpuguard.apply import transaction
from gpuguard.apply.actions import Action, CheckResolved, RebuildInitramfs
from gpuguard.apply.journal import Journal
from gpuguard.apply.leftover import end_left_over, run_tool
from gpuguard.apply.objects import ObjectStore
from gpuguard.apply.recovery import recover
from gpuguard.apply.undo import Wrote, state_of
from gpuguard.errors import StateError
from gpuguard.host import Host, LocalHost
from tests import toys
from tests.box import K1, K2, REPOSITORY, Box, initramfs
from tests.building import needs_root
from tests.test_faults import dpkg

IMAGE = f"/boot/initrd.img-{K2}"
JOURNAL = "var/lib/gpuguard/journal.jsonl"


@pytest.fixture
def killed(box: Box, monkeypatch: pytest.MonkeyPatch) -> Box:
    """A rebuild of K2 that died when modules, configuration and modules.dep were in place."""

    def execute(action: Action, host: Host) -> None:
        if isinstance(action, CheckResolved):
            os._exit(9)
        real(action, host)

    real = gpuguard.apply.execute.execute
    with monkeypatch.context() as patch:
        patch.setattr(transaction, "execute", execute)
        assert box.rebuild("--kernel", K2).status == 9
    assert (box.root / JOURNAL).exists()
    return box


def dep(box: Box) -> str:
    return (box.tree(K2) / "modules.dep").read_text()


def interrupted_image(box: Box) -> LocalHost:
    """A change that began to make the image of K2 anew."""
    host = LocalHost(box.root)
    journal = Journal(host)
    journal.begin("rebuild", K2, "t", None)
    for undo in transaction.undos_of(
        RebuildInitramfs(release=K2, path=IMAGE), host, ObjectStore(host)
    ):
        journal.push(undo)
    return host


def test_what_dkms_installed_since_stays_in_the_index(killed: Box) -> None:
    toys.toy_module(killed.tree(K2) / "updates/dkms/zfs.ko", name="zfs", release=K2, seed="zfs")
    toys.depmod(killed.root, K2)

    answer = killed.run("rollback", "--kernel", K1)  # any verb that changes: recovers first

    assert "ran depmod" in answer.err
    assert "zfs.ko" in dep(killed)
    assert "updates/gpuguard" not in dep(killed)
    assert not (killed.root / JOURNAL).exists()
    killed.rebuilt("--kernel", K2)


def test_a_file_that_somebody_replaced_since_stays(killed: Box) -> None:
    theirs = killed.tree(K2) / "updates/gpuguard/nvidia.ko"
    theirs.write_bytes(b"by hand")
    answer = killed.run("rollback", "--kernel", K1)
    assert "nvidia.ko has been changed since and stays so" in answer.err
    assert theirs.read_bytes() == b"by hand"


@pytest.mark.parametrize("rest", [False, True])
def test_a_kernel_that_was_purged_since_does_not_come_back(killed: Box, rest: bool) -> None:
    tree = killed.tree(K2)
    for entry in tree.iterdir():  # dpkg leaves what is not its own
        if entry.is_symlink() or entry.is_file():
            entry.unlink()
        elif not (rest and entry.name == "updates"):
            shutil.rmtree(entry)
    if rest:
        shutil.rmtree(tree / "updates/dkms")
    else:
        tree.rmdir()
    (killed.root / f"boot/vmlinuz-{K2}").unlink()
    toys.set_next(killed.root, K1)

    answer = killed.run("rebuild")

    assert answer.status == 0, answer.err
    assert f"{K2} is not installed any more" in answer.err
    assert not list(tree.rglob("*.*"))
    assert not (killed.root / f"etc/depmod.d/zz-gpuguard-{K2}.conf").exists()


def test_recovery_waits_for_dpkg(killed: Box) -> None:
    with dpkg(killed):
        before = killed.snapshot()
        answer = killed.json("rebuild")
        assert (answer.status, answer.error["code"]) == (75, "lock-held")
        assert killed.snapshot() == before


def test_an_image_that_was_made_since_stays(box: Box) -> None:
    image = box.path(IMAGE)
    image.write_bytes(b"before")
    interrupted_image(box)
    image.write_bytes(b"made by apt since then")
    answer = box.run("rebuild", "--kernel", K1)
    assert answer.status == 0
    assert f"{IMAGE} has been changed since" in answer.err
    assert image.read_bytes() == b"made by apt since then"


@needs_root
@pytest.mark.parametrize("since", ["stale", "fits", "unreadable"])
def test_an_image_of_unknown_origin_is_looked_into(
    box: Box, install_tool: Callable[..., None], since: str
) -> None:
    good = initramfs(box.root, K2, box.dkms_copy(K2)).read_bytes()
    install_tool(makes=box.path(IMAGE))
    box.path(IMAGE).write_bytes(good + bytes(512))
    host = interrupted_image(box)
    status = box.root / "var/lib/dpkg/status"
    status.parent.mkdir(exist_ok=True)
    status.write_text("apt was here\n")
    if since == "unreadable":
        box.path(IMAGE).write_bytes(b"half")
    else:
        module = {"stale": box.path(f"srv/built/{K2}/nvidia.ko"), "fits": box.dkms_copy(K2)}[since]
        initramfs(box.root, K2, module)
        with box.path(IMAGE).open("ab") as image:
            image.write(bytes(1024))
    theirs = box.path(IMAGE).read_bytes()

    found = recover(host)

    assert found is not None
    assert found.notes
    assert box.path(IMAGE).read_bytes() == (theirs if since == "fits" else good)


def test_a_killed_recovery_leaves_nothing_beside_the_image(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = box.path(IMAGE)
    image.write_bytes(b"old" * 1000)
    host = interrupted_image(box)
    image.write_bytes(b"new")
    Journal(host).push(Wrote(path=IMAGE, state=state_of(IMAGE, host)))
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(shutil, "copyfileobj", lambda *_: os._exit(9))
        recover(host)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert list(image.parent.glob(".*.gpuguard-new"))

    assert recover(host) is not None

    assert image.read_bytes() == b"old" * 1000
    assert not list(image.parent.glob(".*"))


@pytest.mark.parametrize("truncates", [True, False])
def test_a_commit_mark_of_doubt_is_taken_back(
    box: Box, monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    def commit(journal: Journal) -> None:
        def bad(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", bad)
            if not truncates:
                patch.setattr(os, "ftruncate", bad)
            real(journal)

    real = Journal.commit
    before = box.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "commit", commit)
        answer = box.rebuild("--kernel", K2)
    assert answer.error["code"] == "journal-unwritable"
    assert box.snapshot() == before
    assert box.leftovers() == []


def test_a_second_signal_does_not_stop_the_undo(box: Box, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import os, signal, sys
import gpuguard.apply.transaction as transaction
import gpuguard.apply.undoing as undoing
from gpuguard.apply.actions import CheckResolved
from gpuguard.__main__ import main
execute, put_back = transaction.execute, undoing.put_back
def stopped(action, host):
    if isinstance(action, CheckResolved):
        os.kill(os.getpid(), signal.SIGTERM)
    execute(action, host)
def stopped_again(*given):
    os.kill(os.getpid(), signal.SIGTERM)
    put_back(*given)
transaction.execute, undoing.put_back = stopped, stopped_again
sys.argv = ["gpuguard", "--root", {str(box.root)!r}, "rebuild", "--kernel", {K2!r}]
main()
"""
    )
    before = box.snapshot()
    done = subprocess.run(
        [sys.executable, program],
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 143, done.stderr
    assert box.snapshot() == before
    assert box.leftovers() == []


def test_a_folder_comes_back_with_its_mode(box: Box) -> None:
    folder = box.tree(K2) / "updates/old"
    toys.toy_module(folder / "nvidia.ko", release=K2, seed="old")
    folder.chmod(0o700)
    toys.depmod(box.root, K2)
    (box.root / "etc/depmod.d/zzz.conf").write_text("override nvidia * updates/dkms\n")
    assert box.rebuild("--kernel", K2).error["code"] == "not-resolved"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["through", "over"])
def test_an_image_behind_a_link_comes_back(
    box: Box, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    target, link, new = box.root / "boot/real.img", box.path(IMAGE), box.root / "srv/new.img"
    target.write_bytes(b"old initramfs")
    link.symlink_to("real.img")
    new.write_bytes(b"new initramfs")

    def execute(_action: Action, _host: Host) -> None:
        options = ["-f"] if how == "through" else ["--remove-destination"]
        subprocess.run(["cp", *options, str(new), str(link)], check=True)
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(transaction, "execute", execute)
    action = RebuildInitramfs(release=K2, path=IMAGE)
    with pytest.raises(StateError, match="I/O error"):
        transaction.apply(
            (action,), LocalHost(box.root), verb="rebuild", release=K2, started="t", backup=None
        )
    assert target.read_bytes() == b"old initramfs"
    assert link.readlink() == Path("real.img")


@pytest.mark.parametrize("prefix", ["", "setsid "])
def test_what_a_tool_started_is_ended_before_the_undo(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "var/lib/gpuguard").mkdir(parents=True)
    mark, begun = tmp_path / "late", tmp_path / "begun"
    script = tmp_path / "tool"
    script.write_text(
        f"#!/bin/sh\n{prefix}sh -c 'echo > {begun}; sleep 2; echo > {mark}' &\nwait\n"
    )
    script.chmod(0o755)
    host = LocalHost(tmp_path)
    Journal(host).begin("rebuild", K2, "t", None)
    child = os.fork()
    if child == 0:
        run_tool(host, str(script), timeout=60)
        os._exit(0)
    while not begun.exists():
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    end_left_over(host)

    time.sleep(2.2)
    assert not mark.exists()
    assert not (tmp_path / "var/lib/gpuguard/tools").exists()
