"""The boot default is kept on the last good kernel, read back, and let go again."""

from __future__ import annotations

import pytest

from tests.box import K1, K2
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
