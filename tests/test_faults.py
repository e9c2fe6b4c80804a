"""Locks, damaged state, missing rights: a clear error, its exit status, and the host as before."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import toys
from tests.box import K1, K2, Box, efi_variable, read_only
from tests.building import needs_root

STATE = "var/lib/gpuguard"


def refused(box: Box, *words: str) -> tuple[int, str, str]:
    """A verb that must not change anything: exit status, code, message and hint."""
    before, state = box.snapshot(), toys.snapshot(box.root / STATE, without=("lock",))
    answer = box.json(*words)
    assert box.snapshot() == before
    assert toys.snapshot(box.root / STATE, without=("lock",)) == state
    error = answer.error
    assert error["exit_status"] == answer.status
    assert error["hint"]
    return answer.status, error["code"], f"{error['message']}\n{error['hint']}"


# Locks: wait with a limit, then 75


@contextmanager
def another_gpuguard(box: Box) -> Iterator[None]:
    path = box.root / STATE / "lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def dpkg(box: Box) -> Iterator[None]:
    path = box.root / "var/lib/dpkg/lock-frontend"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    # as dpkg does: fcntl(F_SETLK); in a process of its own, which alone can let it go
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX);"
    code += "print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        yield
        process.communicate()


@contextmanager
def dkms(box: Box) -> Iterator[None]:
    script = box.root.parent / "dkms"
    script.write_text("#!/bin/sh\nsleep 60 &\nwait\n")
    script.chmod(0o755)
    command = [script, "install", "nvidia/1", "--installtree", box.root / "lib/modules"]
    process = subprocess.Popen(list(map(str, command)), start_new_session=True)
    try:
        yield
    finally:
        subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=True)
        process.wait()


@pytest.mark.parametrize("who", [another_gpuguard, dpkg, dkms])
@pytest.mark.parametrize("words", [("rebuild",), ("rollback", "--kernel", K2)])
def test_whoever_is_at_work_is_waited_for_and_then_75(
    box: Box, who: Callable[[Box], Iterator[None]], words: tuple[str, ...]
) -> None:
    box.configure(lock_timeout_seconds=0.4)
    (box.root / STATE).mkdir()
    with who(box):  # type: ignore[attr-defined]
        started = time.monotonic()
        status, code, text = refused(box, *words)
        assert time.monotonic() - started >= 0.4
    assert (status, code) == (75, "lock-held")
    assert "try again" in text
    assert not (box.root / "var/log/gpuguard").exists()  # nothing was built for it


def test_a_lock_that_is_let_go_in_time_is_no_error(box: Box) -> None:
    box.configure(lock_timeout_seconds=60)
    with dpkg(box):
        process = box.start("rebuild", "--kernel", K2)
        time.sleep(0.5)
        assert process.poll() is None
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


def test_a_dkms_at_work_on_another_root_is_not_waited_for(box: Box) -> None:
    script = box.root.parent / "dkms"
    script.write_text("#!/bin/sh\nsleep 60 &\nwait\n")
    script.chmod(0o755)
    other = f"{box.root}-other/lib/modules"  # its name begins with ours
    process = subprocess.Popen([script, "install", "--installtree", other], start_new_session=True)
    try:
        box.rebuilt("--kernel", K2)
    finally:
        subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=True)
        process.wait()


def test_looking_waits_for_nobody(box: Box) -> None:
    with another_gpuguard(box), dpkg(box):
        assert box.run("status").status == 1
        assert box.run("plan").status == 1
        assert box.run("backups").status == 0


# Damaged state


def damage(path: Path, content: bytes = b"\0garbage\n") -> None:
    path.write_bytes(content)


@pytest.mark.parametrize(
    "content", [b"garbage\n", b'{"schema": 7}\n', b"[]\n", b'{"schema": 1}\n{}\n']
)
def test_a_journal_that_cannot_be_understood_stops_everything(box: Box, content: bytes) -> None:
    box.rebuilt("--kernel", K1)
    damage(box.root / STATE / "journal.jsonl", content)
    for words in (("rebuild",), ("rollback", "--kernel", K1)):
        status, code, text = refused(box, *words)
        assert (status, code) == (74, "journal-unreadable")
        assert f"move /{STATE}/journal.jsonl away" in text
    assert box.status()["verdict"] == "critical"


def test_a_journal_without_one_whole_line_began_nothing(box: Box) -> None:
    (box.root / STATE).mkdir()
    for content in (b"", b'{"schema": 1, "verb": "reb'):
        (box.root / STATE / "journal.jsonl").write_bytes(content)
        assert box.run("rebuild", "--kernel", K2, "--force").status == 0
        assert box.leftovers() == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": 1, "release": "x"}', b"[1]"])
def test_a_record_that_cannot_be_read_makes_no_guess(box: Box, content: bytes) -> None:
    box.rebuilt()
    record = next((box.root / STATE / "builds" / K2).iterdir())
    damage(record, content)
    for words in (("rebuild",), ("rollback", "--kernel", K2)):
        status, code, text = refused(box, *words)
        assert (status, code) == (74, "state-unreadable")
        assert record.name in text
        assert "move it away" in text
    answer = box.json("status")
    assert answer.status == 3
    assert box.findings(K2)["modules-undetermined"]["severity"] == "unknown"
    assert box.kernel(K1)["ready"] is True  # the others are told all the same

    record.rename(record.with_suffix(".broken"))
    box.rebuilt("--force")
    assert box.kernel(K2)["ready"] is True


def test_a_manifest_that_cannot_be_read_stops_before_anything(box: Box) -> None:
    box.rebuilt("--kernel", K1)
    manifest = next((box.root / STATE / "backups").glob("*.json"))
    damage(manifest)
    for words in (("rebuild",), ("rollback", "--kernel", K1)):
        status, code, text = refused(box, *words)
        assert (status, code) == (74, "backup-unreadable")
        assert f"mv {manifest}" in text
    assert box.run("backups").status == 74
    manifest.rename(manifest.with_suffix(".broken"))
    box.rebuilt()


@pytest.mark.parametrize("gone", [True, False])
def test_a_damaged_backup_is_not_put_back(box: Box, gone: bool) -> None:
    box.rebuilt("--kernel", K2)
    module = next(m for m in box.backups(K2)[0]["modules"] if m["name"] == "nvidia-uvm")
    content = box.root / STATE / "backups/objects" / module["sha256"]
    stock = content.read_bytes()
    content.unlink() if gone else damage(content)

    status, code, text = refused(box, "rollback", "--kernel", K2)

    assert (status, code) == (71, "rollback-failed")
    assert str(content) in text
    assert box.kernel(K2)["ready"] is True

    content.write_bytes(stock)
    assert box.run("rollback", "--kernel", K2).status == 0


def test_a_damaged_content_is_replaced_by_the_next_backup_of_it(box: Box) -> None:
    box.rebuilt("--kernel", K2)
    module = box.backups(K2)[0]["modules"][0]
    damage(box.root / STATE / "backups/objects" / module["sha256"])
    (box.root / f"etc/depmod.d/zz-gpuguard-{K2}.conf").unlink()
    for file in (box.tree(K2) / "updates/gpuguard").iterdir():
        file.unlink()
    toys.depmod(box.root, K2)  # stock again, by hand
    box.rebuilt("--kernel", K2)
    assert box.run("rollback", "--kernel", K2).status == 0


def test_a_failure_note_that_cannot_be_read_is_said(box: Box) -> None:
    note = box.root / STATE / "failures" / f"{K2}.json"
    note.parent.mkdir(parents=True)
    note.write_bytes(b"{")
    assert refused(box, "rebuild")[:2] == (74, "state-unreadable")


@pytest.mark.parametrize("content", [b"\0\xff", b"{}", b'{"schema": 1, "files": {"x": 1}}'])
def test_a_damaged_cache_costs_time_only(box: Box, content: bytes) -> None:
    box.rebuilt()
    damage(box.root / "var/cache/gpuguard/modules.json", content)
    assert box.status()["verdict"] == "ok"


# Files that are not what they should be


@pytest.mark.parametrize("content", [b"", b"\x7fELF\2\1\1", b"not a module"])
def test_garbage_in_place_of_a_module_is_said_and_replaced(box: Box, content: bytes) -> None:
    box.dkms_copy(K2).write_bytes(content)
    found = box.findings(K2)
    assert found["module-unreadable"]["severity"] == "critical"
    assert found["module-unreadable"]["evidence"]["path"].endswith("updates/dkms/nvidia.ko")
    box.rebuilt("--kernel", K2)
    assert box.kernel(K2)["ready"] is True
    assert box.dkms_copy(K2).read_bytes() == content


def test_a_module_without_build_id_is_nobodys(box: Box) -> None:
    toys.toy_module(box.dkms_copy(K2), release=K2, build_id=False)
    toys.depmod(box.root, K2)
    found = box.findings(K2)
    assert "no GNU build-id" in found["module-unreadable"]["message"]
    assert box.kernel(K2)["modules"][0]["identity"] == "stock"


def test_a_module_tree_without_its_index_loads_nothing(box: Box) -> None:
    for file in box.tree(K2).glob("modules.dep*"):
        file.unlink()
    found = box.findings(K2)["modules-missing"]
    assert found["severity"] == "critical"
    box.rebuilt("--kernel", K2)
    assert box.kernel(K2)["ready"] is True


def test_a_folder_in_place_of_our_file_is_not_touched(box: Box) -> None:
    odd = box.tree(K2) / "updates/gpuguard/nvidia.ko"
    odd.mkdir(parents=True)
    before = box.snapshot()
    answer = box.rebuild("--kernel", K2)
    assert (answer.status, answer.error["code"]) == (74, "odd-file")
    assert box.snapshot() == before
    assert box.backups() == []  # nothing changed: nothing to go back to


# Rights


@needs_root
@pytest.mark.parametrize("place", ["lib/modules", "etc", STATE])
def test_a_read_only_file_system_is_found_before_the_build(box: Box, place: str) -> None:
    (box.root / STATE).mkdir(exist_ok=True)
    with read_only(box.root / place):
        status, code, _ = refused(box, "rebuild", "--kernel", K2)
    expected = (74, "state-unwritable") if place == STATE else (69, "read-only")
    assert (status, code) == expected
    assert not (box.root / "var/log/gpuguard").exists()


@needs_root
def test_an_ordinary_user_can_look(box: Box) -> None:
    box.rebuilt()
    document = box.status()
    before = toys.snapshot(box.root, without=())

    answer = box.run("--json", "status", user="nobody")

    assert answer.status == 0, answer.out
    assert json.loads(answer.out) == document
    assert box.run("plan", user="nobody").status == 0
    assert box.run("backups", user="nobody").status == 0
    for words in (("rebuild", "--force"), ("rollback", "--kernel", K2)):
        refusal = box.run("--json", *words, user="nobody")
        assert (refusal.status, refusal.error["code"]) == (77, "needs-root")
        assert "sudo" in refusal.error["hint"]
    assert toys.snapshot(box.root, without=()) == before


@needs_root
@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("boot/grub/grub.cfg", "next-kernel-unknown"),
        (f"boot/initrd.img-{K2}", "initramfs-unknown"),
        (efi_variable("SecureBoot"), "secure-boot-unknown"),
        (f"lib/modules/{K2}/modules.dep.bin", "modules-undetermined"),
        (f"lib/modules/{K2}/updates/other/x", "modules-undetermined"),
    ],
)
def test_what_an_ordinary_user_may_not_read_is_unknown(box: Box, path: str, code: str) -> None:
    box.rebuilt()
    file = box.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_bytes(b"")
    (file.parent if file.name == "x" else file).chmod(0o600)
    answer = box.run("--json", "status", user="nobody")
    assert answer.status == 3
    found = {f["code"]: f for f in answer.document["findings"]}
    assert found[code]["severity"] == "unknown"
    assert "sudo gpuguard status" in found[code]["remedy"]
