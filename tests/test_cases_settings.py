"""Settings and places that decide what is loaded: module lists, links, several versions."""

from __future__ import annotations

import json
import shutil

import pytest

from tests import toys
from tests.box import K1, K2, Box
from tests.patched import patched
from tests.trees import Link, make_tree


@pytest.fixture
def ready(box: Box) -> Box:
    """Both kernels are ready, with modules that no build was needed for."""
    return patched(box, K1, K2)


def boot_with(box: Box, word: str) -> None:
    config = f"menuentry x {{\n linux /boot/vmlinuz-{K2} ro {word}\n}}\n"
    make_tree(box.root, {"boot/grub/grub.cfg": config})


# --- module lists ---------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["module_blacklist=i915,nvidia_uvm", "module_blacklist=nvidia"])
def test_what_the_kernel_itself_will_not_load(ready: Box, words: str) -> None:
    boot_with(ready, words)
    found = ready.findings(K2)["module-blocked"]
    assert found["severity"] == "critical"
    assert words in found["message"]
    assert ready.kernel(K2)["ready"] is False
    assert ready.kernel(K1)["ready"] is True


@pytest.mark.parametrize(
    "words",
    [
        "module_blacklist=nvidia module_blacklist=i915",
        "module_blacklist=nvidiafb",
        "blacklist=nvidia",
    ],
)
def test_other_lists_are_of_no_concern(ready: Box, words: str) -> None:
    boot_with(ready, words)
    assert ready.kernel(K2)["ready"] is True
    assert ready.status()["verdict"] == "ok"


def test_an_install_line_that_installs_nothing(ready: Box) -> None:
    make_tree(ready.root, {"etc/modprobe.d/x.conf": "install nvidia-uvm /bin/false\n"})
    found = ready.findings(K2)
    assert "install nvidia-uvm /bin/false" in found["module-blocked"]["message"]
    assert "modules-missing" not in found  # new modules would not help
    assert ready.kernel(K2)["ready"] is False


def test_an_install_line_for_what_nobody_built_is_of_no_concern(box: Box) -> None:
    patched(box, K1, K2, names=("nvidia", "nvidia-uvm"))
    make_tree(box.root, {"etc/modprobe.d/x.conf": "install nvidia-drm /bin/false\n"})
    assert box.kernel(K2)["ready"] is True


def test_a_blacklist_is_a_warning(ready: Box) -> None:
    make_tree(ready.root, {"etc/modprobe.d/x.conf": "# blacklist nvidia-uvm\nblacklist nvidia\n"})
    found = ready.findings()["module-blacklisted"]
    assert found["severity"] == "warning"
    assert "nvidia (/etc/modprobe.d/x.conf)" in found["message"]
    assert "nvidia-uvm" not in found["message"]
    assert ready.kernel(K2)["ready"] is True


def test_a_blacklist_may_stand_on_the_command_line(ready: Box) -> None:
    boot_with(ready, "modprobe.blacklist=nouveau,nvidia")
    assert "command line" in ready.findings()["module-blacklisted"]["message"]


def test_a_blacklist_of_others_is_of_no_concern(ready: Box) -> None:
    text = "blacklist nvidiafb\nblacklist nouveau\nblacklist nvidia-drm\n"
    make_tree(ready.root, {"etc/modprobe.d/x.conf": text})
    boot_with(ready, "modprobe.blacklist=nouveau")
    assert ready.status()["verdict"] == "ok"


# --- versions -------------------------------------------------------------------------------


def test_modules_that_we_do_not_build_must_be_of_the_same_version(box: Box) -> None:
    patched(box, K1, K2, names=("nvidia",))
    uvm = box.dkms_copy(K2, "nvidia-uvm")
    toys.toy_module(uvm, name="nvidia-uvm", release=K2, version="999.05.01")
    toys.depmod(box.root, K2)
    found = box.findings(K2)["module-versions-differ"]
    assert "999.05.01" in found["message"]
    assert "build.modules" in found["remedy"]
    assert "nvidia-uvm.ko" in found["evidence"]["not built by gpuguard"]
    assert box.kernel(K2)["ready"] is False


# --- trees and loaders ----------------------------------------------------------------------


@pytest.mark.parametrize("absolute", [True, False])
def test_modules_behind_links_to_folders_are_seen(box: Box, absolute: bool) -> None:
    tree = box.tree(K2)
    shutil.move(tree / "updates", box.root / "srv/updates")
    target = "/srv/updates" if absolute else "../../../srv/updates"
    make_tree(tree, {"updates": Link(str(box.root / "srv/updates") if absolute else target)})
    make_tree(tree, {"kernel/loop": Link("..")})
    toys.depmod(box.root, K2)
    module = box.kernel(K2)["modules"][0]
    assert module["identity"] == "stock"
    assert module["path"] == f"/lib/modules/{K2}/updates/dkms/nvidia.ko"


def test_links_out_of_the_root_are_not_followed(box: Box) -> None:
    outside = box.root.parent / "outside"
    toys.toy_module(outside / "nvidia.ko", release=K2, seed="outside")
    make_tree(box.tree(K2), {"updates/away": Link(str(outside))})
    assert box.kernel(K2)["modules"][0]["others"] == []


def test_extlinux_decides_where_it_is(ready: Box) -> None:
    make_tree(ready.root, {"boot/extlinux/extlinux.conf": "default old\n"})
    status = ready.status()
    assert status["next_kernel"]["release"] is None
    assert status["next_kernel"]["source"] == "extlinux"
    assert status["reboot"]["safe"] is False


def test_the_tree_of_the_running_kernel_is_never_a_leftover(box: Box) -> None:
    (box.root / f"boot/vmlinuz-{K1}").unlink()
    assert "leftover-module-tree" not in box.findings(K1)
    toys.set_running(box.root, K2)
    assert "leftover-module-tree" in box.findings(K1)


def test_an_interrupted_change_is_not_safe_to_reboot_into(ready: Box) -> None:
    assert ready.status()["reboot"]["safe"] is True
    state = {"schema": 1, "verb": "rebuild", "release": K2, "started": "x", "backup": None}
    make_tree(ready.root, {"var/lib/gpuguard/journal.jsonl": json.dumps(state) + "\n"})
    reboot = ready.status()["reboot"]
    assert reboot["safe"] is False
    assert "interrupted" in reboot["reasons"][0]


def test_variables_of_a_menu_that_double_end_in_an_error(ready: Box) -> None:
    make_tree(ready.root, {"boot/grub/grub.cfg": "set a=xxxxxxxx\n" + 'set a="${a}${a}"\n' * 60})
    found = ready.status()["next_kernel"]
    assert found["release"] is None
    assert "characters" in found["reason"]


# --- text -----------------------------------------------------------------------------------


def test_what_a_terminal_would_obey_is_shown_instead(box: Box) -> None:
    toys.toy_module(box.dkms_copy(K2), release="\\033]0;owned\\007\\033[31m\\u202eX")
    text = box.run("status", "--verbose").out
    assert "\\x1b]0;owned\\x07" in text
    assert "\\u202e" in text
    assert "\x1b" not in text
