"""Decisions that a hostile reading once found wrong: what is gone, has changed, is whose."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable

import pytest

from gpuguard.build.progress import Silent
from gpuguard.config_file import load_config
from gpuguard.core.plan import Request
from gpuguard.host import LocalHost
from gpuguard.verbs.inspect import make_plan
from gpuguard.verbs.rebuild import rebuild
from tests import toys
from tests.box import K1, K2, PATCH, SOURCE, Box
from tests.trees import make_tree


def test_a_next_kernel_whose_image_is_not_seen_is_not_forgotten(box: Box) -> None:
    # systemd-boot with images on the ESP alone, or a stray image below an unmounted /boot
    box.rebuilt()
    (box.root / f"boot/vmlinuz-{K2}").unlink()

    box.rebuild()

    ours = box.tree(K2) / "updates/gpuguard"
    assert len(list(ours.iterdir())) == len(toys.NAMES)
    assert box.json("backups", "--kernel", K2).document["backups"]


def test_a_purged_kernel_is_forgotten_and_its_index_renewed(box: Box) -> None:
    box.rebuilt()
    (box.root / f"boot/vmlinuz-{K1}").unlink()
    toys.set_running(box.root, K2)
    shutil.rmtree(box.tree(K1) / "kernel")  # what dpkg leaves: the folder with our files in it

    box.rebuilt()

    assert not (box.tree(K1) / "updates/gpuguard").exists()
    assert "updates/gpuguard" not in (box.tree(K1) / "modules.dep").read_text()
    assert box.json("backups", "--kernel", K1).document["backups"] == []


def test_a_rebuild_of_one_kernel_decides_nothing_about_another(box: Box) -> None:
    box.rebuilt()
    (box.root / f"boot/vmlinuz-{K1}").unlink()
    shutil.rmtree(box.tree(K1) / "kernel")
    toys.set_running(box.root, K2)

    box.rebuilt("--kernel", K2, "--force")

    assert box.json("backups", "--kernel", K1).document["backups"]


def test_a_ready_kernel_without_headers_is_left_alone(box: Box) -> None:
    box.rebuilt()
    shutil.rmtree(box.root / "usr/src" / f"linux-headers-{K1}")

    answer = box.rebuild()

    assert answer.status == 0
    assert {step["action"] for step in answer.document["steps"]} == {"leave"}


def test_a_build_that_loses_to_another_copy_is_tried_again_when_that_changes(box: Box) -> None:
    site = box.root / "etc/depmod.d/zzz-site.conf"
    site.write_text("override nvidia * updates/dkms\n")
    first = box.rebuild("--kernel", K2)
    assert first.status == 70
    assert first.error["code"] == "not-resolved"

    again = box.rebuild("--kernel", K2)
    assert again.status == 1
    assert [step["action"] for step in again.document["steps"]] == ["leave"]
    assert "--force" in again.document["steps"][0]["reasons"][0]

    site.unlink()
    box.rebuilt("--kernel", K2)
    assert box.kernel(K2)["ready"] is True


def test_a_depmod_file_of_the_operator_stays(box: Box) -> None:
    mine = box.root / "etc/depmod.d/zz-gpuguard-local.conf"
    mine.write_text("# by hand\noverride nvidia-fs * extra\n")

    box.rebuilt()

    assert mine.read_text().startswith("# by hand")


def test_a_packaged_module_below_updates_stays_and_causes_no_loop(box: Box) -> None:
    inside = f"lib/modules/{K2}/updates/vendor/nvidia-peermem.ko"
    toys.toy_module(box.root / inside, name="nvidia-peermem", release=K2, seed="vendor")
    package = "Package: vendor-peermem\nStatus: install ok installed\nVersion: 1\n"
    make_tree(
        box.root,
        {
            "var/lib/dpkg/info/vendor-peermem.list": f"/.\n/{inside}\n",
            "var/lib/dpkg/status": f"{package}Architecture: amd64\n\n",
        },
    )
    toys.depmod(box.root, K2)

    box.rebuilt("--kernel", K2)

    assert (box.root / inside).exists()
    assert box.json("plan", "--kernel", K2).document["converged"] is True


def test_a_clock_that_went_backwards_makes_no_loop(box: Box) -> None:
    box.rebuilt("--kernel", K2)
    folder = box.root / "var/lib/gpuguard/builds" / K2
    (old,) = folder.iterdir()
    record = json.loads(old.read_text()) | {"created": "2031-01-01T00:00:00Z"}
    old.unlink()
    (folder / "2031-01-01T000000Z.json").write_text(json.dumps(record))
    patch = box.root / PATCH
    patch.write_text(patch.read_text() + "\n")
    box.compile_to(K2, seed="newer")

    box.rebuilt("--kernel", K2)

    plan = box.json("plan", "--kernel", K2).document
    assert [step["action"] for step in plan["steps"]] == ["leave"]


def test_after_a_rollback_to_an_older_build_its_own_record_counts(box: Box) -> None:
    box.rebuilt("--kernel", K2)
    patch = box.root / PATCH
    patch.write_text(patch.read_text() + "\n")
    box.compile_to(K2, seed="newer")
    box.rebuilt("--kernel", K2)
    assert box.json("rollback", "--kernel", K2).status == 0

    plan = box.json("plan", "--kernel", K2).document

    assert plan["steps"][0]["reasons"] == ["patches changed since the last build"]


def test_the_backup_of_a_change_survives_its_own_retention(box: Box) -> None:
    box.configure(build={"user": "nobody"}, backups={"keep": 1})
    box.rebuilt("--kernel", K2)
    backups = box.root / "var/lib/gpuguard/backups"
    for manifest in backups.glob("*.json"):  # made by a clock that was ahead
        document = json.loads(manifest.read_text()) | {"created": "2031-01-01T00:00:00Z"}
        manifest.write_text(json.dumps(document))
    box.compile_to(K2, seed="newer")

    taken = box.rebuilt("--kernel", K2, "--force")["steps"][0]["backup"]

    assert taken in {b["id"] for b in box.json("backups").document["backups"]}


@pytest.mark.parametrize("folder", ["usr/lib/depmod.d", "run/depmod.d"])
def test_depmod_of_a_tree_reads_all_of_the_trees_configuration(box: Box, folder: str) -> None:
    (box.root / folder).mkdir(parents=True)
    (box.root / folder / "zzz-vendor.conf").write_text("override nvidia * updates/dkms\n")

    answer = box.rebuild("--kernel", K2)

    assert answer.error["code"] == "not-resolved"  # and not "fine" until depmod's next run


def test_a_source_that_nothing_calls_patched_is_refused(box: Box) -> None:
    box.configure(source={"path": f"/{SOURCE}", "patches": []})
    before = box.snapshot()

    answer = box.rebuild("--kernel", K2)

    assert answer.status == 78
    assert answer.error["code"] == "source-not-patched"
    assert "already_patched" in answer.error["hint"]
    assert box.snapshot() == before


def test_the_operators_word_that_a_source_is_patched_counts(box: Box) -> None:
    box.configure(source={"path": f"/{SOURCE}", "patches": [], "already_patched": True})

    box.rebuilt("--kernel", K2)

    assert box.kernel(K2)["ready"] is True


def test_a_patch_that_changes_nothing_that_is_compiled_is_refused(box: Box) -> None:
    readme = "--- /dev/null\n+++ b/README\n@@ -0,0 +1 @@\n+text\n"
    (box.root / PATCH).write_text(readme)

    answer = box.rebuild("--kernel", K2)

    assert answer.status == 65
    assert answer.error["code"] == "patch-changes-nothing"


def test_a_file_that_the_index_names_and_that_is_gone_is_rebuilt(box: Box) -> None:
    box.rebuilt("--kernel", K2)
    (box.tree(K2) / "updates/gpuguard/nvidia.ko").unlink()

    box.rebuilt("--kernel", K2)

    assert box.kernel(K2)["ready"] is True


def test_two_suffixes_of_our_own_module_are_cleaned(box: Box) -> None:
    box.rebuilt("--kernel", K2)
    ours = box.tree(K2) / "updates/gpuguard"
    subprocess.run(["xz", "-k", "--check=crc32", ours / "nvidia.ko"], check=True)
    toys.depmod(box.root, K2)

    box.rebuilt("--kernel", K2)

    assert sorted(path.name for path in ours.glob("nvidia.ko*")) == ["nvidia.ko"]


def test_a_strict_umask_leaves_the_index_readable_for_all(box: Box) -> None:
    before = os.umask(0o077)
    try:
        box.rebuilt("--kernel", K2)
    finally:
        os.umask(before)

    assert (box.tree(K2) / "modules.dep.bin").stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to remount")
def test_a_rollback_on_a_read_only_file_system_begins_nothing(box: Box) -> None:
    box.rebuilt("--kernel", K2)
    tree = box.tree(K2)
    subprocess.run(["mount", "--bind", tree, tree], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", tree], check=True)
        answer = box.json("rollback", "--kernel", K2)
    finally:
        subprocess.run(["umount", tree], check=True)

    assert (answer.status, answer.error["code"]) == (69, "read-only")
    assert "change-interrupted" not in box.findings()


class WhileSourceIsCopied(Silent):
    """Somebody saves a file just then."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def step(self, name: str, detail: str, estimate_seconds: float | None) -> None:
        if name == "source":
            self._act()


def test_a_passing_cause_is_not_remembered(box: Box) -> None:
    host = LocalHost(box.root)
    config = load_config(host)
    file = box.root / SOURCE / "version.mk"
    text = file.read_text()
    planned = make_plan(host, config, Request(releases=(K2,)))

    saved = WhileSourceIsCopied(lambda: file.write_text(f"{text}# saving\n"))
    (outcome,) = rebuild(host, config, planned, saved)

    assert outcome.error is not None
    assert outcome.error.code == "source-changed"
    file.write_text(text)
    plan = box.json("plan", "--kernel", K2).document
    assert plan["steps"][0]["action"] == "rebuild"  # and not "failed before"
