"""The wrong module on disk or in memory: CASES C15 to C20, by the real program on real trees."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import toys
from tests.box import K1, K2, Box, furnish, load, set_userland
from tests.patched import record

# C15: a DKMS copy always beats the modified one


@pytest.mark.parametrize("search", [None, "search updates ubuntu built-in\n"])
def test_patched_below_kernel_is_shadowed_by_dkms(box: Box, search: str | None) -> None:
    if search:
        (box.root / "etc/depmod.d/ubuntu.conf").write_text(search)
    ours = toys.toy_module(
        box.tree(K1) / "kernel/drivers/video/nvidia.ko", release=K1, seed="patched"
    )
    toys.depmod(box.root, K1)
    record(box, K1, ours)

    found = box.findings(K1)["patched-shadowed"]

    assert found["severity"] == "warning"
    assert found["evidence"] == {
        "loaded": f"/lib/modules/{K1}/updates/dkms/nvidia.ko",
        "patched": f"/lib/modules/{K1}/kernel/drivers/video/nvidia.ko",
    }
    assert found["remedy"] == f"gpuguard rebuild --kernel {K1}"
    assert box.kernel(K1)["modules"][0]["identity"] == "stock"

    box.rebuilt("--kernel", K1)

    assert box.kernel(K1)["ready"] is True
    assert box.winner(K1) == f"/lib/modules/{K1}/updates/gpuguard/nvidia.ko"


def test_one_version_string_for_both_does_not_fool(box: Box) -> None:
    record(box, K1, toys.toy_module(box.root / "elsewhere/nvidia.ko", release=K1, seed="patched"))
    versions = {module["version"] for module in box.kernel(K1)["modules"]}
    assert versions == {toys.VERSION}
    assert "modules-stock" in box.findings(K1)


def test_a_build_for_one_kernel_is_not_ours_in_another(box: Box) -> None:
    box.rebuilt("--kernel", K1)
    shutil.copytree(box.tree(K1) / "updates/gpuguard", box.tree(K2) / "updates", dirs_exist_ok=True)
    toys.depmod(box.root, K2)
    assert box.kernel(K2)["modules"][0]["identity"] == "stock"


# C16: the old module is still loaded


def test_installed_but_not_loaded_asks_for_a_reboot(box: Box) -> None:
    load(box.root, box.dkms_copy(K1))
    toys.set_next(box.root, K1)
    box.rebuilt("--kernel", K1)

    status = box.status()

    assert status["driver"]["loaded_identity"] == "stock"
    assert status["kernels"][0]["ready"] is True
    assert status["reboot"] == {
        "required": True,
        "safe": True,
        "reasons": ["patched modules are installed, the loaded one is another"],
    }
    found = box.findings("driver")["loaded-stock"]
    assert found["remedy"] == (
        "the patched modules are installed for this kernel: reboot to load them"
    )
    again = box.rebuilt()  # no second try, no way back, just because the old one is loaded
    assert [step["action"] for step in again["steps"] if step["release"] == K1] == ["leave"]
    assert box.kernel(K1)["ready"] is True


def test_an_older_build_of_ours_that_is_loaded_asks_for_a_reboot_too(box: Box) -> None:
    toys.set_next(box.root, K1)
    box.rebuilt("--kernel", K1)
    load(box.root, box.tree(K1) / "updates/gpuguard/nvidia.ko")
    assert box.status()["reboot"]["required"] is False
    box.compile_to(K1, seed="newer")
    box.rebuilt("--kernel", K1, "--force")

    status = box.status()

    assert status["driver"]["loaded_identity"] == "patched"
    assert status["reboot"]["required"] is True
    assert status["reboot"]["safe"] is True


def test_nothing_is_loaded_or_unloaded(box: Box) -> None:
    load(box.root, box.dkms_copy(K1))
    before = toys.snapshot(box.root / "sys")
    box.rebuilt()
    assert toys.snapshot(box.root / "sys") == before


# C19: two suffixes, Debian's names


@pytest.mark.parametrize("suffix", [".xz", ".zst", ".gz"])
def test_two_suffixes_of_one_module_are_a_conflict(box: Box, suffix: str) -> None:
    other = box.dkms_copy(K2).with_name(f"nvidia.ko{suffix}")
    toys.toy_module(other, release=K2, seed="older", version="999.09.99")
    toys.depmod(box.root, K2)

    found = box.findings(K2)["module-two-suffixes"]

    both = [f"/lib/modules/{K2}/updates/dkms/nvidia.ko{s}" for s in ("", suffix)]
    assert all(path in found["message"] for path in both)
    assert f"depmod {K2}" in found["remedy"]


def test_a_module_of_another_suffix_than_its_kernels_is_read(box: Box) -> None:
    for name in toys.NAMES:  # a kernel whose configuration says ZSTD, with plain files
        box.dkms_copy(K2, name).unlink()
    toys.stock_modules(box.root, K2, suffix=".xz")
    module = box.kernel(K2)["modules"][0]
    assert module["path"].endswith(".ko.xz")
    assert module["version"] == toys.VERSION
    assert module["build_id"]


@pytest.mark.parametrize("suffix", ["", ".xz", ".zst"])
def test_modules_end_as_the_kernels_own_and_one_suffix_is_left(box: Box, suffix: str) -> None:
    folder = box.tree(K2) / "updates/gpuguard"
    box.rebuilt("--kernel", K2)
    own = box.tree(K2) / "kernel/net"
    (own / "dummy.ko").unlink()
    toys.toy_module(own / f"dummy.ko{suffix}", name="dummy", release=K2)

    box.rebuilt("--kernel", K2, "--force")

    assert sorted(p.name for p in folder.iterdir()) == sorted(f"{n}.ko{suffix}" for n in toys.NAMES)
    assert box.winner(K2).endswith(f"updates/gpuguard/nvidia.ko{suffix}")
    assert box.kernel(K2)["ready"] is True


def debian_names(box: Box, release: str, flavour: str = "nvidia-current-open") -> None:
    """As Debian's package installs them: other file names, reached through modprobe.d."""
    folder = box.tree(release) / "updates/dkms"
    lines = []
    for name in toys.NAMES:
        base = name.replace("nvidia", flavour, 1)
        (folder / f"{name}.ko").rename(folder / f"{base}.ko")
        lines.append(f"install {name} modprobe -i {base} $CMDLINE_OPTS\n")
    (box.root / "etc/modprobe.d/nvidia.conf").write_text("".join(lines))
    toys.depmod(box.root, release)


def test_debian_names_are_resolved_and_kept(box: Box) -> None:
    for release in (K1, K2):
        debian_names(box, release)
    assert box.winner(K2) == f"/lib/modules/{K2}/updates/dkms/nvidia-current-open.ko"
    assert {m["identity"] for m in box.kernel(K2)["modules"]} == {"stock"}

    box.rebuilt("--kernel", K2)

    assert box.winner(K2) == f"/lib/modules/{K2}/updates/gpuguard/nvidia-current-open.ko"
    assert box.winner(K2, "nvidia-drm").endswith("updates/gpuguard/nvidia-current-open-drm.ko")
    assert box.kernel(K2)["ready"] is True
    box.run("rollback", "--kernel", K2)
    assert box.winner(K2) == f"/lib/modules/{K2}/updates/dkms/nvidia-current-open.ko"


def test_a_kernel_without_modules_gets_the_names_that_the_others_use(empty_root: Path) -> None:
    box = furnish(empty_root, K1, K2)
    debian_names(box, K1)
    shutil.rmtree(box.tree(K2) / "updates")
    toys.depmod(box.root, K2)
    assert box.findings(K2)["modules-missing"]["severity"] == "critical"

    box.rebuilt("--kernel", K2)

    assert box.winner(K2) == f"/lib/modules/{K2}/updates/gpuguard/nvidia-current-open.ko"
    assert box.kernel(K2)["ready"] is True


def test_ubuntu_prebuilt_modules_below_kernel_are_beaten(empty_root: Path) -> None:
    box = furnish(empty_root, K1, K2, stock=False)
    for name in toys.NAMES:
        prebuilt = box.tree(K2) / "kernel/nvidia-580-open" / f"{name}.ko.zst"
        toys.toy_module(prebuilt, name=name, release=K2)
    own = box.tree(K2) / "kernel/net/dummy.ko"
    own.unlink()
    toys.toy_module(own.with_name("dummy.ko.zst"), name="dummy", release=K2)
    toys.depmod(box.root, K2)
    assert box.winner(K2) == f"/lib/modules/{K2}/kernel/nvidia-580-open/nvidia.ko.zst"

    box.rebuilt("--kernel", K2)

    assert box.winner(K2) == f"/lib/modules/{K2}/updates/gpuguard/nvidia.ko.zst"
    assert box.kernel(K2)["ready"] is True
    assert box.run("rollback", "--kernel", K2).status == 0
    assert box.winner(K2) == f"/lib/modules/{K2}/kernel/nvidia-580-open/nvidia.ko.zst"


def test_a_module_that_modprobe_is_told_not_to_load_is_blocked(box: Box) -> None:
    (box.root / "etc/modprobe.d/off.conf").write_text("install nvidia /bin/false\n")
    found = box.findings(K2)["module-blocked"]
    assert found["severity"] == "critical"
    answer = box.rebuild("--kernel", K2)
    assert (answer.status, answer.error["code"]) == (70, "not-resolved")
    assert "modprobe.d" in answer.error["hint"]
    assert not (box.tree(K2) / "updates/gpuguard").exists()


# C20: backups inside the module tree


def test_a_backup_in_the_tree_is_reported_and_moved(box: Box) -> None:
    stray = box.tree(K1) / "updates/aaa-backup/nvidia.ko"
    toys.toy_module(stray, release=K1, seed="from an older run")
    toys.depmod(box.root, K1)
    content, inside = stray.read_bytes(), f"/lib/modules/{K1}/updates/aaa-backup/nvidia.ko"
    found = box.findings(K1)["backup-in-module-tree"]
    assert found["severity"] == "warning"
    assert inside in found["message"]
    assert f"gpuguard rebuild --kernel {K1}" in found["remedy"]

    box.rebuilt("--kernel", K1)

    assert not stray.parent.exists()
    assert "backup-in-module-tree" not in box.findings(K1)
    kept = box.root / "var/lib/gpuguard/backups/objects"
    assert content in [path.read_bytes() for path in kept.iterdir()]
    manifest = next((box.root / "var/lib/gpuguard/backups").glob(f"*{K1}.json"))
    assert inside in manifest.read_text()


def test_a_backup_in_the_tree_that_won_comes_back_by_rollback(box: Box) -> None:
    stray = box.tree(K1) / "updates/aaa-backup/nvidia.ko"
    toys.toy_module(stray, release=K1, seed="from an older run")
    for name in toys.NAMES:
        box.dkms_copy(K1, name).unlink()
    toys.depmod(box.root, K1)
    content = stray.read_bytes()
    assert box.winner(K1).endswith("aaa-backup/nvidia.ko")
    box.rebuilt("--kernel", K1)

    assert box.run("rollback", "--kernel", K1).status == 0

    winner = box.path(box.winner(K1))
    assert winner.read_bytes() == content
    assert "aaa-backup" not in str(winner)


def test_a_ready_kernel_with_a_backup_in_its_tree_is_cleaned(box: Box) -> None:
    box.rebuilt()
    toys.toy_module(box.tree(K1) / "updates/old/nvidia-uvm.ko", name="nvidia-uvm", release=K1)
    toys.depmod(box.root, K1)
    assert box.kernel(K1)["ready"] is True  # ours wins by its override line
    assert "backup-in-module-tree" in box.findings(K1)
    box.rebuilt()
    assert "backup-in-module-tree" not in box.findings(K1)


def test_a_bak_file_is_ignored(box: Box) -> None:
    bak = box.tree(K1) / "updates/aaa-backup/nvidia.ko.bak"
    toys.toy_module(bak.with_name("nvidia.ko"), release=K1, seed="x").rename(bak)
    toys.depmod(box.root, K1)
    assert "backup-in-module-tree" not in box.findings(K1)
    box.rebuilt("--kernel", K1)
    assert bak.exists()


# C34, as far as files tell


def test_a_userland_of_another_point_release_is_a_mismatch(box: Box) -> None:
    set_userland(box.root, "999.10.04")
    found = box.findings(K2)["version-mismatch"]
    assert found["severity"] == "critical"
    assert "999.10.01" in found["message"]
    assert "999.10.04" in found["message"]


def test_a_loaded_driver_of_another_point_release_asks_for_a_reboot(box: Box) -> None:
    load(box.root, box.dkms_copy(K1))
    set_userland(box.root, "999.10.04")
    found = box.findings("driver")["driver-library-mismatch"]
    assert found["severity"] == "critical"
    assert "999.10.01" in found["message"]
    assert "999.10.04" in found["message"]
    assert box.status()["reboot"]["required"] is True


# C52: the proprietary flavour cannot be patched


def test_the_proprietary_flavour_is_said_plainly(box: Box) -> None:
    load(box.root, box.dkms_copy(K1))
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  999.10.01  Thu Oct  6 21:38:55 UTC 2022\n"
    )
    (box.root / "proc/driver/nvidia/version").write_text(text)
    status = box.status()
    assert status["driver"]["flavour"] == "proprietary"
    assert status["driver"]["loaded"] == "999.10.01"
    found = box.findings("driver")["proprietary-driver"]
    assert found["severity"] == "critical"
    assert "open kernel modules" in found["remedy"]
