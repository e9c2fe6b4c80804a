"""What the boot loader really starts: its own initrd, a unified image, its command line."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from tests import toys
from tests.box import K1, K2, Box, initramfs
from tests.patched import patched
from tests.trees import make_tree

ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def ready(box: Box) -> Box:
    """Both kernels are ready; no loader but the /vmlinuz link is there."""
    patched(box, K1, K2)
    assert box.kernel(K2)["ready"] is True
    return box


def stale_image(box: Box, target: str) -> Path:
    """An image with another build of the driver, at a place of the loader's own."""
    other = toys.toy_module(box.root / "srv/other/nvidia.ko", release=K2, seed="other")
    path = box.path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(initramfs(box.root, K2, other, compress=".zst"), path)
    return path


def systemd_boot(box: Box, folder: str, *lines: str) -> None:
    (box.root / "vmlinuz").unlink()
    text = "\n".join((f"version {K2}", f"linux /{ID}/{K2}/linux", *lines))
    files = {f"loader/entries/{ID}-{K2}.conf": f"{text}\n", f"{ID}/{K2}/linux": "kernel"}
    make_tree(box.path(folder), files)


def grub(box: Box, *lines: str, arguments: str = "") -> None:
    body = "\n".join((f"linux /boot/vmlinuz-{K2} root=/dev/sda1 {arguments}", *lines))
    make_tree(box.root, {"boot/grub/grub.cfg": f"menuentry 'x' {{\n{body}\n}}\n"})


def unified(sections: dict[str, bytes]) -> bytes:
    """A program for EFI with sections and no code."""
    begin = 0x80 + 24 + 40 * len(sections)
    headers, content = b"", b""
    for name, data in sections.items():
        place = begin + len(content)
        headers += struct.pack(
            "<8sIIII16x", name.encode(), len(data), 0x1000, len(data) + 12, place
        )
        content += data + bytes(12)  # sections are padded to the file's alignment
    head = struct.pack("<2s58xI", b"MZ", 0x80).ljust(0x80, b"\0")
    return head + struct.pack("<4s2xH12xH2x", b"PE\0\0", len(sections), 0) + headers + content


def finding(box: Box, code: str) -> dict[str, Any]:
    found = box.findings(K2)
    assert code in found
    assert box.kernel(K2)["ready"] is False
    assert box.status()["reboot"]["safe"] is False
    return found[code]


@pytest.mark.parametrize("folder", ["/efi", "/boot", "/boot/efi"])
def test_the_initrd_on_the_esp_is_the_one_that_boots(ready: Box, folder: str) -> None:
    image = f"{folder}/{ID}/{K2}/initrd.img-{K2}"
    stale_image(ready, image)
    systemd_boot(ready, folder, f"initrd /{ID}/{K2}/initrd.img-{K2}")
    assert image in finding(ready, "initramfs-stale")["message"]
    assert ready.kernel(K2)["initramfs_path"] == image


def test_every_initrd_of_an_entry_counts(ready: Box) -> None:
    stale_image(ready, "/efi/b.img")
    make_tree(ready.root, {"efi/a.img": initramfs(ready.root, K2).read_bytes()})
    systemd_boot(ready, "/efi", "initrd /b.img", "initrd /a.img")
    assert finding(ready, "initramfs-stale")


def test_grub_may_load_an_initrd_of_any_name(ready: Box) -> None:
    stale_image(ready, "/boot/initrd-custom")
    grub(ready, "initrd /boot/initrd-custom")
    assert "/boot/initrd-custom" in finding(ready, "initramfs-stale")["message"]


@pytest.mark.parametrize("named", ["/initrd-custom", "($root)/@/boot/initrd-custom"])
def test_paths_of_grub_begin_at_a_file_system(ready: Box, named: str) -> None:
    stale_image(ready, "/boot/initrd-custom")
    grub(ready, f"initrd /boot/microcode.img {named}")
    make_tree(ready.root, {"boot/microcode.img": initramfs(ready.root, K1).read_bytes()})
    assert finding(ready, "initramfs-stale")


def test_an_initrd_that_is_not_found_is_unknown(ready: Box) -> None:
    initramfs(ready.root, K2)
    grub(ready, "initrd /elsewhere/image")
    assert "/elsewhere/image" in finding(ready, "initramfs-unknown")["message"]


def test_an_entry_that_names_the_usual_image_changes_nothing(ready: Box) -> None:
    grub(ready, f"initrd /boot/initrd.img-{K2}")
    assert ready.kernel(K2)["initramfs"] == "none"  # which is not made yet
    initramfs(ready.root, K2, ready.dkms_copy(K2))
    assert ready.kernel(K2)["initramfs"] == "current"
    assert ready.kernel(K2)["initramfs_path"] == f"/boot/initrd.img-{K2}"


def install_unified(box: Box, content: bytes) -> str:
    (box.root / "vmlinuz").unlink()
    name = f"/efi/EFI/Linux/debian-{K2}.efi"
    make_tree(box.root, {name: content})
    return name


def test_a_unified_image_is_looked_into(ready: Box) -> None:
    initrd = stale_image(ready, "/srv/initrd").read_bytes()
    name = install_unified(ready, unified({".uname": K2.encode(), ".initrd": initrd}))
    found = finding(ready, "initramfs-stale")
    assert name in found["message"]
    assert "kernel-install" in found["remedy"]
    assert ready.kernel(K2)["initramfs_path"] is None  # no tool may write an initramfs there


def test_a_unified_image_with_our_modules_is_ready(ready: Box) -> None:
    initrd = initramfs(ready.root, K2, ready.dkms_copy(K2), compress=".zst").read_bytes()
    install_unified(ready, unified({".linux": b"kernel", ".initrd": initrd}))
    assert ready.kernel(K2)["initramfs"] == "current"
    assert ready.kernel(K2)["ready"] is True


@pytest.mark.parametrize(
    "content",
    [b"MZ, and nothing that makes sense", b"MZ", b"", unified({".initrd": b"x" * 99})[:-40]],
)
def test_a_unified_image_that_cannot_be_read_is_unknown(ready: Box, content: bytes) -> None:
    install_unified(ready, content)
    assert finding(ready, "initramfs-unknown")["severity"] == "unknown"


def test_a_unified_image_states_its_release(ready: Box) -> None:
    (ready.root / "vmlinuz").unlink()
    content = unified({".uname": f"{K1}\n".encode(), ".cmdline": b"quiet\n"})
    make_tree(ready.root, {f"efi/EFI/Linux/not-{K2}.efi": content})
    assert ready.status()["next_kernel"]["release"] == K1
