"""The boot default is kept on the last good kernel, read back, and let go again."""

from __future__ import annotations

import os

import pytest

from tests.box import K1, K2, Box
from tests.windowbox import WindowBox

PIN = "/etc/default/grub.d/zz-gpuguard.cfg"


pytestmark = pytest.mark.slow


def install_by_hand(box: WindowBox) -> None:
    """K2 is installed by apt alone."""
    packages = ("linux-image-generic", "linux-headers-generic", "linux-kbuild-6.8")
    box.install("--allow-change-held-packages", *packages)


def test_what_cannot_be_made_ready_does_not_boot_next(window_box: WindowBox) -> None:
    box = window_box
    box.break_build(K2)
    install_by_hand(box)
    assert box.status()["next_kernel"]["release"] == K2
    box.configure(reboot={"keep_last_good": "always"})
    assert box.rebuild().status == 70
    status = box.status()
    assert status["next_kernel"]["release"] == K1
    assert status["reboot"]["safe"] is True
    assert status["boot_default"]["release"] == K1
    assert status["boot_default"]["file"] == PIN
    assert "boot-default-pinned" in box.findings()
    # a kernel package's update-grub changes nothing about that
    box.inside("update-grub")
    assert box.status()["next_kernel"]["release"] == K1

    box.mend_build(K2)
    box.rebuilt("--force")
    status = box.status()
    assert status["next_kernel"]["release"] == K2
    assert status["boot_default"] is None
    assert not box.path(PIN).exists()
    assert box.path("/etc/default/grub.d").is_dir()


def not_ready(box: WindowBox, **reboot: str) -> None:
    """K2 is installed, boots next, and the modules do not compile for it."""
    box.break_build(K2)
    install_by_hand(box)
    box.configure(reboot={"keep_last_good": "always", **reboot})


def boot_files(box: WindowBox) -> dict[str, str]:
    files = (*box.path("/etc/default").rglob("*"), *box.path("/boot/grub").iterdir())
    return {str(path): path.read_text() for path in files if path.is_file()}


@pytest.mark.parametrize(
    ("policy", "kept"), [("always", True), ("window", False), ("never", False)]
)
def test_the_policy_decides(window_box: WindowBox, policy: str, kept: bool) -> None:
    box = window_box
    not_ready(box, keep_last_good=policy)
    assert box.run("rebuild").status == 70
    assert box.path(PIN).exists() is kept
    assert box.status()["next_kernel"]["release"] == (K1 if kept else K2)
    if kept:  # and a policy that changes lets go
        box.configure(reboot={"keep_last_good": "never"})
        box.run("rebuild")
        assert not box.path(PIN).exists()
        assert box.status()["next_kernel"]["release"] == K2


def test_an_automatic_run_settles_it_too(window_box: WindowBox) -> None:
    box = window_box
    not_ready(box)
    box.run("rebuild", "--automatic")
    assert box.status()["next_kernel"]["release"] == K1
    box.mend_build(K2)
    box.run("rebuild", "--force")
    assert box.status()["next_kernel"]["release"] == K2


def test_a_kernel_that_was_rolled_back_may_boot_as_it_is(window_box: WindowBox) -> None:
    box = window_box
    install_by_hand(box)
    box.configure(reboot={"keep_last_good": "always"})
    box.rebuilt()
    assert box.run("rollback", "--stock", "--kernel", K2).status == 0
    box.run("rebuild", "--automatic")
    assert box.kernel(K2)["ready"] is False
    assert box.status()["next_kernel"]["release"] == K2
    assert not box.path(PIN).exists()


def test_the_operators_own_default_comes_back(window_box: WindowBox) -> None:
    box = window_box
    box.path("/etc/default/grub").write_text("GRUB_DEFAULT=0\nGRUB_TIMEOUT=7\n")
    not_ready(box)
    box.inside("update-grub")
    before = boot_files(box)
    box.run("rebuild")
    assert box.status()["next_kernel"]["release"] == K1
    assert box.path("/etc/default/grub").read_text() == "GRUB_DEFAULT=0\nGRUB_TIMEOUT=7\n"
    box.mend_build(K2)
    box.rebuilt("--force")
    assert boot_files(box) == before


def test_what_has_no_effect_is_undone_and_said(window_box: WindowBox) -> None:
    box = window_box
    not_ready(box)
    # another file that sorts last of all
    box.path("/etc/default/grub.d/zzz-site.cfg").write_text("GRUB_DEFAULT=0\n")
    before = boot_files(box)
    answer = box.run("rebuild")
    assert answer.status == 70
    assert "boot-default-failed" in answer.err
    assert boot_files(box) == before
    assert box.status()["next_kernel"]["release"] == K2
    assert box.status()["reboot"]["safe"] is False
    assert box.leftovers() == []


def test_a_tool_that_fails_leaves_all_as_it_was(window_box: WindowBox) -> None:
    box = window_box
    not_ready(box)
    script = box.path("/usr/sbin/update-grub")
    script.write_text("#!/bin/sh\necho half >/boot/grub/grub.cfg\nexit 1\n")
    before = boot_files(box)
    answer = box.run("rebuild")
    assert "boot-menu-failed" in answer.err
    assert boot_files(box) == before


def test_killed_within_its_tool(window_box: WindowBox) -> None:
    box = window_box
    not_ready(box)
    script = box.path("/usr/sbin/update-grub")
    good = script.read_text()
    came, go = box.path("/run/came"), box.path("/run/go")
    for pipe in (came, go):
        os.mkfifo(pipe)
    held_up = "echo half >/boot/grub/grub.cfg; echo come >/run/came; read word </run/go"
    script.write_text(f"#!/bin/sh\n{held_up}\n")
    before = boot_files(box)
    process = box.start("rebuild")
    assert came.read_text() == "come\n"
    assert box.path(PIN).exists()
    process.kill()
    process.communicate(timeout=60)
    script.write_text(good)
    assert "change-interrupted" in box.findings()
    answer = box.run("hold")
    assert "boot-default of" in answer.err
    assert boot_files(box) == before
    assert not box.path(PIN).exists()
    assert box.leftovers() == []


def test_the_kernel_that_was_kept_is_purged(window_box: WindowBox) -> None:
    box = window_box
    not_ready(box)
    box.run("rebuild")
    assert box.path(PIN).exists()
    box.run("unhold")
    box.inside("apt-get", "purge", "-y", "-q", f"linux-image-{K1}", f"linux-headers-{K1}")
    assert box.status()["next_kernel"]["release"] == K2  # GRUB falls back to the first
    box.mend_build(K2)
    box.rebuilt("--force")
    assert not box.path(PIN).exists()


def systemd_boot(box: Box) -> str:
    """Both kernels as entries of systemd-boot; its loader.conf."""
    for release in (K1, K2):
        box.path("/efi/loader/entries").mkdir(parents=True, exist_ok=True)
        image = box.path(f"/efi/m/{release}/linux")
        image.parent.mkdir(parents=True)
        image.write_bytes(b"image")
        box.path(f"/efi/loader/entries/m-{release}.conf").write_text(
            f"title Toy\nversion {release}\nmachine-id m\nsort-key toy\nlinux /m/{release}/linux\n"
        )
    text = "timeout 3\ndefault m-*\n#console-mode keep\n"
    box.path("/efi/loader/loader.conf").write_text(text)
    box.path("/vmlinuz").unlink()
    return text


def test_systemd_boot(box: Box) -> None:
    text = systemd_boot(box)
    box.configure(reboot={"keep_last_good": "always"})
    assert box.rebuild("--kernel", K1).status == 0
    loader = box.path("/efi/loader/loader.conf")
    assert f"default m-{K1}.conf" in loader.read_text()
    status = box.status()
    assert status["next_kernel"] == {
        "release": K1, "source": "systemd-boot", "reason": f"entry 'm-{K1}.conf'"
    }  # fmt: skip
    assert status["boot_default"]["loader"] == "systemd-boot"
    assert box.rebuild().status == 0
    assert loader.read_text() == text
    assert box.status()["next_kernel"]["release"] == K2


def test_a_loader_that_cannot_be_told(box: Box) -> None:
    box.configure(reboot={"keep_last_good": "always"})
    before = box.snapshot()
    answer = box.run("rebuild", "--kernel", K1)
    assert "boot-default-impossible" in answer.err  # the /vmlinuz link is nobody's setting
    assert K1 in answer.err
    assert {
        k: v for k, v in box.snapshot().items() if k.startswith(("boot", "vmlinuz", "efi"))
    } == {k: v for k, v in before.items() if k.startswith(("boot", "vmlinuz", "efi"))}
