"""CASES.md B and C: which kernels there are, which boots next, and which are gone."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests import toys
from tests.box import K1, K2, Box, furnish

#: A make log with its first error at line 3100 of 4,000, and only some modules made.
FAILING_MAKEFILE = """\
modules:
\t@cp BUILT/nvidia.ko .
\t@seq -f "  CC [M]  nvidia/file%g.o" 3099
\t@echo "$(CURDIR)/nvidia-uvm/uvm.c:77:5: error: too few arguments to function 'get_user_pages'"
\t@seq -f "cc1: note: noise %g" 899
\t@echo "$(CURDIR)/nvidia-uvm/later.c:1:1: error: a later one"
\t@false
"""


def test_kernels_are_ordered_as_dpkg_does_and_flavours_kept_apart(empty_root: Path) -> None:
    releases = [
        "6.8.0-9-generic", K1, K2, "6.12.90+deb13-amd64", "6.12.90+deb13.1-amd64",
        "7.0.0-28-generic", "7.0.0-28-lowlatency",
    ]  # fmt: skip
    box = furnish(empty_root, *releases)
    toys.set_next(box.root, K1)
    leftover = "6.5.0-26-generic"
    toys.toy_module(box.tree(leftover) / "updates/dkms/nvidia.ko", release=leftover)

    status = box.status()

    assert [k["release"] for k in status["kernels"]] == releases
    assert status["next_kernel"]["release"] == K1
    assert [k["roles"] for k in status["kernels"] if k["roles"]] == [["running"], ["next"]]
    found = {f["subject"]: f for f in status["findings"] if f["code"] == "leftover-module-tree"}
    assert set(found) == {leftover}
    assert f"rm -r /lib/modules/{leftover}" in found[leftover]["remedy"]
    steps = box.json("plan").document["steps"]
    assert [s["release"] for s in steps] == [K1, *[r for r in releases if r != K1]]
    answer = box.rebuild("--kernel", leftover)
    assert (answer.status, answer.error["code"]) == (2, "no-such-kernel")


def test_the_next_kernel_is_the_boot_loaders_word(box: Box) -> None:
    menu = box.root / "boot/grub/grub.cfg"
    menu.parent.mkdir()
    menu.write_text(
        "menuentry 'gone' {\n linux /boot/vmlinuz-6.9.9-1-generic root=/dev/vda1 ro\n}\n"
    )
    assert box.findings()["next-kernel-not-installed"]["severity"] == "critical"
    shutil.rmtree(menu.parent)
    (box.root / "vmlinuz").unlink()
    assert box.findings()["next-kernel-unknown"]["severity"] == "unknown"
    answer = box.rebuild("--next")
    assert (answer.status, answer.error["code"]) == (2, "next-kernel-unknown")


def test_records_of_a_kernel_that_went_away_are_dropped(box: Box) -> None:
    box.rebuilt()
    shutil.rmtree(box.tree(K1) / "kernel")
    (box.root / f"boot/vmlinuz-{K1}").unlink()
    toys.set_running(box.root, K2)
    answer = box.rebuilt()
    assert {s["release"]: s["action"] for s in answer["steps"]} == {K2: "leave", K1: "forget"}
    assert not (box.tree(K1) / "updates/gpuguard").exists()
    assert not (box.root / f"etc/depmod.d/zz-gpuguard-{K1}.conf").exists()
    assert box.kernel(K2)["ready"] is True


def test_a_kernel_that_a_package_manager_took_away_leaves_no_folders(box: Box) -> None:
    box.rebuilt()
    for name in ("kernel", "build", "updates/dkms"):  # as dpkg and dkms do, each its own
        path = box.tree(K1) / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    for index in box.tree(K1).glob("modules.*"):
        index.unlink()
    (box.root / f"boot/vmlinuz-{K1}").unlink()
    toys.set_running(box.root, K2)
    box.rebuilt()
    assert not box.tree(K1).exists()


def test_an_unmounted_boot_is_no_reason_to_forget_anything(box: Box) -> None:
    box.rebuilt()
    (box.root / "boot").rename(box.root / "elsewhere")
    (box.root / "boot").mkdir()
    before = box.snapshot()
    assert box.findings()["no-kernels"]["severity"] == "unknown"
    box.rebuild()
    assert box.snapshot() == before
    (box.root / "boot").rmdir()
    (box.root / "elsewhere").rename(box.root / "boot")
    assert box.status()["verdict"] == "ok"


# C34: userland .04, source .01
