"""Back to what resolved before, byte for byte; and the way back is never lost."""

from __future__ import annotations

import shutil

import pytest

from gpuguard.host.files import sha256_file
from tests import toys
from tests.box import K1, K2, Box


def resolved(box: Box, release: str) -> dict[str, str]:
    """SHA-256 of every module that would be loaded, by name."""
    modules = box.kernel(release)["modules"]
    return {m["name"]: sha256_file(box.path(m["path"])) for m in modules if m["path"]}


def rolled_back(box: Box, *words: str) -> str:
    """Roll back; the id with which that can be undone."""
    answer = box.json("rollback", *words)
    assert answer.status == 0, answer.out + answer.err
    return str(answer.document["backup_before"])


def refused(box: Box, *words: str) -> tuple[int, str, str]:
    before = box.snapshot()
    answer = box.json("rollback", *words)
    assert box.snapshot() == before
    return answer.status, answer.error["code"], answer.error["hint"]


def test_there_and_back_again(box: Box) -> None:
    tree, stock = box.snapshot(), resolved(box, K2)
    box.rebuilt("--kernel", K2)
    patched_tree, patched = box.snapshot(), resolved(box, K2)
    assert set(stock.values()).isdisjoint(patched.values())

    undo = rolled_back(box, "--kernel", K2)

    assert resolved(box, K2) == stock
    assert box.snapshot() == tree
    redo = rolled_back(box, undo)
    assert resolved(box, K2) == patched
    assert box.snapshot() == patched_tree
    assert box.kernel(K2)["ready"] is True
    rolled_back(box, redo)
    assert box.snapshot() == tree


def test_the_newest_that_differs_is_taken(box: Box) -> None:
    stock = resolved(box, K2)
    box.rebuilt("--kernel", K2)
    first = resolved(box, K2)
    box.compile_to(K2, seed="newer")
    box.rebuilt("--kernel", K2, "--force")
    assert resolved(box, K2) != first
    rolled_back(box, "--kernel", K2)
    assert resolved(box, K2) == first
    assert box.kernel(K2)["ready"] is True  # an older build of ours is ours
    rolled_back(box, "--kernel", K2, "--stock")
    assert resolved(box, K2) == stock


@pytest.mark.parametrize("what", ["changed", "gone", "other suffix", "renamed"])
def test_dkms_own_copy_is_not_needed(box: Box, what: str) -> None:
    stock = resolved(box, K2)
    box.rebuilt("--kernel", K2)
    folder = box.tree(K2) / "updates/dkms"
    if what == "changed":
        toys.stock_modules(box.root, K2, seed="rebuilt by dkms")
    else:
        shutil.rmtree(folder)
    if what == "other suffix":
        toys.stock_modules(box.root, K2, suffix=".xz", seed="rebuilt by dkms")
    if what == "renamed":
        for name in toys.NAMES:
            file = folder / f"{name.replace('nvidia', 'nvidia-current-open', 1)}.ko"
            toys.toy_module(file, name=name, release=K2, seed="rebuilt by dkms")
    toys.depmod(box.root, K2)
    assert box.kernel(K2)["ready"] is True
    dkms = toys.snapshot(folder)

    rolled_back(box, "--kernel", K2)

    assert resolved(box, K2) == stock
    assert toys.snapshot(folder) == dkms  # not ours to touch
    rolled_back(box, "--kernel", K2)
    assert box.kernel(K2)["ready"] is True


def test_a_kernel_that_had_no_modules_has_none_again(box: Box) -> None:
    shutil.rmtree(box.tree(K2) / "updates")
    toys.depmod(box.root, K2)
    box.rebuilt("--kernel", K2)
    assert box.kernel(K2)["ready"] is True
    rolled_back(box, "--kernel", K2)
    assert not (box.tree(K2) / "updates/gpuguard").exists()
    assert resolved(box, K2) == {}


def test_a_backup_belongs_to_its_kernel(box: Box) -> None:
    box.rebuilt()
    of_k1 = box.backups(K1)[0]["id"]
    assert refused(box, of_k1, "--kernel", K2)[:2] == (2, "backup-of-other-kernel")
    assert refused(box, "20200101T000000Z-" + K1)[:2] == (2, "no-such-backup")
    assert refused(box, "--kernel", "6.9.9-1-generic")[:2] == (2, "no-such-kernel")
    assert refused(box, "../../../etc/passwd")[:2] == (2, "no-such-backup")


def test_without_a_backup_there_is_no_way_back(box: Box) -> None:
    assert refused(box, "--kernel", K2)[:2] == (2, "no-such-backup")
    assert box.backups() == []


def test_a_dry_run_says_what_and_does_nothing(box: Box) -> None:
    box.rebuilt("--kernel", K2)
    before = toys.snapshot(box.root, without=("var/cache",))
    answer = box.json("rollback", "--kernel", K2, "--dry-run")
    assert answer.status == 0
    assert answer.document["backup"]["identity"] == "stock"
    assert toys.snapshot(box.root, without=("var/cache",)) == before


def test_one_backup_to_keep_keeps_the_way_back(box: Box) -> None:
    stock = resolved(box, K2)
    box.configure(backups={"keep": 1})
    for number in range(4):
        box.compile_to(K2, seed=f"build {number}")
        box.rebuilt("--kernel", K2, "--force")
    kept = box.backups(K2)
    assert [b["identity"] for b in kept] == ["stock", "patched"]
    objects = box.root / "var/lib/gpuguard/backups/objects"
    needed = {m["sha256"] for b in kept for m in b["modules"]}
    assert needed <= {path.name for path in objects.iterdir()}
    assert len(list(objects.iterdir())) < len(needed) + 12  # depmod's old files are gone
    rolled_back(box, "--kernel", K2, "--stock")
    assert resolved(box, K2) == stock


def test_a_module_is_kept_once_however_often_it_is_backed_up(box: Box) -> None:
    for _ in range(3):
        box.rebuilt("--kernel", K2, "--force")
    assert len(box.backups(K2)) == 3
    objects = box.root / "var/lib/gpuguard/backups/objects"
    contents = [path.read_bytes() for path in objects.iterdir()]
    assert len(contents) == len(set(contents))
    assert {p.stat().st_mode & 0o777 for p in objects.iterdir()} == {0o600}


def test_a_rollback_that_would_not_win_is_undone(box: Box) -> None:
    box.rebuilt("--kernel", K2)
    shutil.rmtree(box.tree(K2) / "updates/dkms")
    extra = box.root / "etc/depmod.d/zzz-other.conf"
    toys.toy_module(box.tree(K2) / "updates/zz/nvidia.ko", release=K2, seed="third party")
    extra.write_text(f"override nvidia {K2} updates/zz\n")
    toys.depmod(box.root, K2)
    status, code, hint = refused(box, "--kernel", K2)
    assert (status, code) == (70, "not-resolved")
    assert "depmod configuration" in hint
    assert box.leftovers() == []
