"""CASES C21: the old module lives on in the initramfs. Real images, and a real tool in the tree.

The tool is the tree's own, run through chroot: a static program that does what its plan says.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.box import K1, K2, Box, initramfs
from tests.building import needs_root, small_disk


def our_image(box: Box, release: str, compress: str = "") -> Path:
    """An image as it should become: what the next build makes is inside."""
    return initramfs(
        box.root, release, box.path(f"srv/built/{release}/nvidia.ko"), compress=compress
    )


def calls(box: Box) -> list[str]:
    log = box.root / "srv/tool.log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("compress", ["", ".zst", ".xz", ".gz"])
def test_what_is_inside_is_told_by_build_id(box: Box, compress: str) -> None:
    initramfs(box.root, K1, box.dkms_copy(K1), box.dkms_copy(K1, "nvidia-drm"), compress=compress)
    initramfs(box.root, K2, box.dkms_copy(K1), compress=compress)  # newer, and another build
    assert box.kernel(K1)["initramfs"] == "current"
    found = box.findings(K2)["initramfs-stale"]
    assert found["severity"] == "critical"
    assert f"/boot/initrd.img-{K2}" in found["message"]
    assert box.kernel(K2)["initramfs"] == "stale"


def test_an_image_without_the_driver_is_left_alone(box: Box) -> None:
    image = initramfs(box.root, K2, compress=".zst")
    before = image.read_bytes()
    assert box.kernel(K2)["initramfs"] == "none"
    box.rebuilt("--kernel", K2)
    assert image.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"garbage, not an image", b"\x28\xb5\x2f\xfd broken"])
def test_an_image_that_cannot_be_read_is_unknown(box: Box, content: bytes) -> None:
    (box.root / f"boot/initrd.img-{K2}").write_bytes(content)
    found = box.findings(K2)["initramfs-unknown"]
    assert found["severity"] == "unknown"
    assert box.kernel(K2)["ready"] is False
    assert box.kernel(K2)["initramfs"] == "unknown"


@needs_root
def test_the_tools_of_the_tree_rebuild_one_image(
    box: Box, install_tool: Callable[..., None]
) -> None:
    install_tool(makes=our_image(box, K2, ".zst"))
    other = initramfs(box.root, K1, box.dkms_copy(K1), compress=".zst")
    initramfs(box.root, K2, box.dkms_copy(K2), compress=".zst")
    untouched = other.read_bytes()

    box.rebuilt("--kernel", K2)

    assert calls(box) == [f"/usr/sbin/update-initramfs -u -k {K2}"]
    assert box.kernel(K2)["initramfs"] == "current"
    assert box.kernel(K2)["ready"] is True
    assert other.read_bytes() == untouched


@needs_root
def test_a_stale_image_alone_needs_no_new_modules(
    box: Box, install_tool: Callable[..., None]
) -> None:
    box.rebuilt()
    install_tool(makes=our_image(box, K2))
    old = initramfs(box.root, K2, box.dkms_copy(K2)).read_bytes()
    plan = box.json("plan", "--kernel", K2)
    assert (plan.status, plan.document["steps"][0]["action"]) == (1, "refresh-initramfs")

    done = box.rebuilt()

    assert [s["action"] for s in done["steps"]] == ["refresh-initramfs", "leave"]
    assert box.kernel(K2)["ready"] is True
    kept = box.root / "var/lib/gpuguard/backups/objects"
    assert old in [path.read_bytes() for path in kept.iterdir()]


@needs_root
@pytest.mark.parametrize("place", ["usr/bin/dracut", "usr/sbin/dracut"])
def test_dracut_serves_where_it_is_the_only_one(
    box: Box, install_tool: Callable[..., None], place: str
) -> None:
    install_tool(place, makes=our_image(box, K2))
    initramfs(box.root, K2, box.dkms_copy(K2))
    box.rebuilt("--kernel", K2)
    assert calls(box) == [f"/{place} --force /boot/initrd.img-{K2} {K2}"]
    assert box.kernel(K2)["initramfs"] == "current"


def test_without_any_tool_nothing_is_touched(box: Box) -> None:
    initramfs(box.root, K2, box.dkms_copy(K2))
    before = box.snapshot()
    answer = box.rebuild("--kernel", K2)
    assert (answer.status, answer.error["code"]) == (69, "initramfs-tool-missing")
    assert "apt install initramfs-tools" in answer.error["hint"]
    assert not (box.root / "var/log/gpuguard").exists()  # said before anything is compiled
    assert box.snapshot() == before
    assert box.leftovers() == []


@needs_root
@pytest.mark.parametrize("fails", [True, False])
def test_a_tool_that_fails_or_lies_leaves_everything_as_before(
    box: Box, install_tool: Callable[..., None], fails: bool
) -> None:
    install_tool(makes=initramfs(box.root, K2, box.dkms_copy(K1)))  # an image with yet another
    if fails:
        (box.root / "srv/tool-fails").touch()
    initramfs(box.root, K2, box.dkms_copy(K2))
    before = box.snapshot()

    answer = box.rebuild("--kernel", K2)

    code = "initramfs-failed" if fails else "initramfs-not-current"
    assert (answer.status, answer.error["code"]) == (70, code)
    if fails:
        assert "mkinitramfs failure" in answer.error["detail"]
        assert f"update-initramfs -u -k {K2}" in answer.error["hint"]
    (box.root / "srv/tool.log").unlink()
    assert box.snapshot() == before
    assert box.leftovers() == []
    assert "modules-stock" in box.kernel(K2)["obstacles"]


@needs_root
def test_rollback_rebuilds_the_image_and_looks_inside(
    box: Box, install_tool: Callable[..., None]
) -> None:
    install_tool(makes=our_image(box, K2))
    initramfs(box.root, K2, box.dkms_copy(K2))
    box.rebuilt("--kernel", K2)
    stock = initramfs(box.root, K2, box.dkms_copy(K2))
    shutil.copy(stock, box.root / "srv/new-image")
    our_image(box, K2)

    assert box.run("rollback", "--kernel", K2).status == 0

    assert len(calls(box)) == 2
    assert box.kernel(K2)["initramfs"] == "current"
    assert box.kernel(K2)["modules"][0]["identity"] == "stock"


@needs_root
def test_room_in_boot_is_looked_at_first(box: Box, install_tool: Callable[..., None]) -> None:
    install_tool()
    boot = box.root / "boot"
    kept = box.root / "kept"
    initramfs(box.root, K2, box.dkms_copy(K2))
    with (boot / f"initrd.img-{K2}").open("ab") as image:
        image.write(bytes(600 << 10))
    shutil.copytree(boot, kept)
    with small_disk(boot, "1m"):
        shutil.copytree(kept, boot, dirs_exist_ok=True)
        before = box.snapshot()
        answer = box.rebuild("--kernel", K2)
        assert (answer.status, answer.error["code"]) == (69, "boot-space")
        assert "apt autoremove --purge" in answer.error["hint"]
        assert box.snapshot() == before
        assert calls(box) == []
