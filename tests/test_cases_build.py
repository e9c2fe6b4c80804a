"""DKMS and the build: CASES C22, C23, C25, C28, C30, C33, C34, by the real program."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import toys
from tests.box import K1, K2, PATCH, SOURCE, Box, add_headers, set_userland
from tests.building import gcc_text

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


def makefile(box: Box) -> Path:
    return box.root / SOURCE / "kernel-open/Makefile"


def fails_untouched(box: Box, *words: str) -> tuple[int, str, str]:
    """Rebuild, see that it fails and leaves everything as it was: status, code, text."""
    before = box.snapshot()
    answer = box.rebuild(*words)
    assert box.snapshot() == before
    assert box.leftovers() == []
    error = answer.error
    assert error["exit_status"] == answer.status
    return answer.status, error["code"], f"{error['message']}\n{error['hint']}\n{error['detail']}"


# C22: built for the running kernel, filed under the new one


def test_a_module_of_another_kernel_is_told_by_its_vermagic(box: Box) -> None:
    for name in toys.NAMES:
        toys.toy_module(box.dkms_copy(K2, name), name=name, release=K1, seed="misfiled")
    toys.depmod(box.root, K2)
    found = box.findings(K2)["vermagic-mismatch"]
    assert found["severity"] == "critical"
    assert found["evidence"]["vermagic"].split()[0] == K1
    assert f"gpuguard rebuild --kernel {K2}" in found["remedy"]
    box.rebuilt("--kernel", K2)
    assert box.kernel(K2)["ready"] is True


def test_a_build_for_another_kernel_is_not_installed(box: Box) -> None:
    box.compile_to(K2, release=K1)
    status, code, text = fails_untouched(box, "--kernel", K2)
    assert (status, code) == (70, "vermagic-mismatch")
    assert K1 in text
    assert K2 in text


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"version": "999.10.04"}, "module-version-mismatch"),
        ({"build_id": False}, "no-build-id"),
    ],
)
def test_what_was_made_is_checked(box: Box, how: dict[str, Any], code: str) -> None:
    box.compile_to(K2, **how)
    assert fails_untouched(box, "--kernel", K2)[:2] == (70, code)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"not a module at all\n"])
def test_a_truncated_module_is_not_installed(box: Box, content: bytes) -> None:
    (box.root / "srv/built" / K2 / "nvidia-drm.ko").write_bytes(content)
    status, code, text = fails_untouched(box, "--kernel", K2)
    assert (status, code) == (70, "module-unreadable")
    assert "nvidia-drm" in text


def test_all_modules_or_none(box: Box) -> None:
    (box.root / "srv/built" / K2 / "nvidia-uvm.ko").unlink()
    status, code, text = fails_untouched(box, "--kernel", K2)
    assert (status, code) == (70, "modules-incomplete")
    assert "nvidia-uvm" in text


# C23: headers missing


def missing(box: Box) -> None:
    (box.tree(K2) / "build").unlink()


def dangling(box: Box) -> None:
    shutil.rmtree(box.root / "usr/src" / f"linux-headers-{K2}")


def without_makefile(box: Box) -> None:
    (box.root / "usr/src" / f"linux-headers-{K2}" / "Makefile").unlink()


def of_another_kernel(box: Box) -> None:
    missing(box)
    (box.tree(K2) / "build").symlink_to(f"/usr/src/linux-headers-{K1}")


@pytest.mark.parametrize(
    ("spoil", "state", "code"),
    [
        (missing, "missing", "headers-missing"),
        (dangling, "missing", "headers-missing"),
        (without_makefile, "incomplete", "headers-incomplete"),
        (of_another_kernel, "incomplete", "headers-wrong-kernel"),
    ],
)
def test_headers_that_will_not_do(
    box: Box, spoil: Callable[[Box], None], state: str, code: str
) -> None:
    box.rebuilt("--kernel", K1)
    spoil(box)

    assert box.kernel(K2)["headers"] == state
    remedy = box.findings(K2)["next-kernel-stock"]["remedy"]
    reinstall = "" if state == "missing" else "--reinstall "
    assert f"apt install {reinstall}linux-headers-{K2}" in remedy
    assert f"until then boot {K1}" in remedy
    plan = box.json("plan")
    assert plan.status == 69
    step = next(s for s in plan.document["steps"] if s["release"] == K2)
    assert [b["code"] for b in step["blockers"]] == [code]

    status, found, text = fails_untouched(box)

    assert (status, found) == (69, code)
    assert f"linux-headers-{K2}" in text
    assert "until then" in text
    assert not (box.root / "var/lib/gpuguard/failures").exists()  # tried again by the timer

    add_headers(box.root, K2)
    box.rebuilt()
    assert box.kernel(K2)["ready"] is True


def test_headers_of_another_architecture(box: Box) -> None:
    file = box.root / "usr/src" / f"linux-headers-{K2}" / ".config"
    file.write_text(file.read_text().replace("CONFIG_X86_64", "CONFIG_ARM64"))
    status, code, text = fails_untouched(box, "--kernel", K2)
    assert (status, code) == (69, "architecture-mismatch")
    assert "arm64" in text


# C25: DKMS's own opinion is no evidence


def test_overwritten_by_our_build_is_good_and_clean_stock_is_lost(box: Box) -> None:
    box.rebuilt("--kernel", K2)
    ours, stock = box.tree(K2) / "updates/gpuguard", box.root / "stock"
    shutil.copytree(box.tree(K2) / "updates/dkms", stock)
    for name in toys.NAMES:  # dkms: installed (WARNING! Diff between built and installed module!)
        shutil.copy(ours / f"{name}.ko", box.dkms_copy(K2, name))
    shutil.rmtree(ours)
    (box.root / f"etc/depmod.d/zz-gpuguard-{K2}.conf").unlink()
    toys.depmod(box.root, K2)
    assert box.kernel(K2)["ready"] is True

    for name in toys.NAMES:  # dkms install --force: installed, and the warning is gone
        shutil.copy(stock / f"{name}.ko", box.dkms_copy(K2, name))
    toys.depmod(box.root, K2)

    assert box.findings(K2)["next-kernel-stock"]["severity"] == "critical"


# C28: does not compile


def test_a_compile_error_changes_nothing_and_is_not_tried_again(box: Box) -> None:
    box.rebuilt("--kernel", K1)
    good = makefile(box).read_text()
    makefile(box).write_text(FAILING_MAKEFILE.replace("BUILT", str(box.root / "srv/built" / K2)))

    status, code, text = fails_untouched(box, "--kernel", K2)

    assert (status, code) == (70, "build-failed")
    first = text.splitlines()[0]
    assert "kernel-open/nvidia-uvm/uvm.c:77: error: too few arguments" in first
    log = max((box.root / "var/log/gpuguard").glob(f"build-{K2}-*.log"))
    assert f"/var/log/gpuguard/{log.name}" in text
    assert len(log.read_text().splitlines()) > 4000
    found = box.findings(K2)["build-failed"]
    assert found["severity"] == "critical"
    assert f"gpuguard rebuild --force --kernel {K2}" in found["remedy"]
    assert f"until then boot {K1}, which is ready" in found["remedy"]
    assert box.kernel(K1)["ready"] is True

    logs = len(list(log.parent.iterdir()))
    again = box.rebuild("--kernel", K2)
    assert again.status == 1  # not ready, and nothing was tried: not 0 for `rebuild && reboot`
    assert again.document["steps"][0]["action"] == "leave"
    assert "--force tries again" in again.document["steps"][0]["reasons"][0]
    assert box.rebuild("--kernel", K2, "--force").status == 70
    assert len(list(log.parent.iterdir())) == logs + 1
    makefile(box).write_text(good)  # an input changed
    box.rebuilt("--kernel", K2)
    assert "build-failed" not in box.findings(K2)


@pytest.mark.parametrize("what", ["patch", "headers", "version"])
def test_a_failed_build_is_tried_again_when_an_input_changes(box: Box, what: str) -> None:
    makefile(box).write_text("modules:\n\t@echo 'x.c:1:1: error: no'; false\n")
    assert box.rebuild("--kernel", K2).status == 70
    assert box.json("plan", "--kernel", K2).document["steps"][0]["action"] == "leave"
    if what == "patch":
        (box.root / PATCH).write_text("A new headline.\n" + (box.root / PATCH).read_text())
    elif what == "headers":
        symbols = box.root / "usr/src" / f"linux-headers-{K2}" / "Module.symvers"
        symbols.write_text(symbols.read_text() + "0x02\tnew\tvmlinux\tEXPORT_SYMBOL\n")
    else:
        set_userland(box.root, "999.10.04")
        box.configure(driver_version="999.10.04")
        for name in ("version.mk", "kernel-open/Kbuild"):
            file = box.root / SOURCE / name
            file.write_text(file.read_text().replace("999.10.01", "999.10.04"))
    assert box.json("plan", "--kernel", K2).document["steps"][0]["action"] == "rebuild"
    assert box.rebuild("--kernel", K2).status == 70


def test_one_kernels_failure_does_not_stop_the_other(box: Box) -> None:
    box.compile_to(K2, release=K1)
    answer = box.rebuild()
    assert answer.status == 70
    assert {s["release"]: s["ok"] for s in answer.document["steps"]} == {K2: False, K1: True}
    assert box.kernel(K1)["ready"] is True


@pytest.mark.parametrize("what", ["patch", "headers", "source"])
def test_a_ready_kernel_is_rebuilt_when_an_input_changes(box: Box, what: str) -> None:
    box.rebuilt()
    assert box.json("plan").document["converged"] is True
    file = {
        "patch": box.root / PATCH,
        "headers": box.root / "usr/src" / f"linux-headers-{K2}" / "Module.symvers",
        "source": box.root / SOURCE / "src/nvidia/src/p2p_policy.c",
    }[what]
    with file.open("a") as text:
        text.write("\n")
    plan = box.json("plan")
    assert plan.status == 1
    due = {s["release"]: s["reasons"] for s in plan.document["steps"] if s["action"] == "rebuild"}
    assert set(due) == ({K2} if what == "headers" else {K1, K2})
    word = "patches" if what == "patch" else what
    assert due[K2] == [f"{word} changed since the last build"]


# C30: the compiler


def compiled_by(box: Box, text: str) -> None:
    file = box.root / "usr/src" / f"linux-headers-{K2}" / ".config"
    file.write_text(file.read_text().replace(gcc_text(), text))


def test_another_major_compiler_is_asked_for_by_package(box: Box) -> None:
    compiled_by(box, "x86_64-linux-gnu-gcc-97 (Ubuntu 97.3.0-6ubuntu2~24.04) 97.3.0")
    status, code, text = fails_untouched(box, "--kernel", K2)
    assert (status, code) == (69, "compiler-mismatch")
    assert "apt-get install gcc-97" in text
    assert "97.3.0" in text


def test_a_compiler_by_its_versioned_name_alone_is_found(box: Box, tmp_path: Path) -> None:
    compiled_by(box, "x86_64-linux-gnu-gcc-97 (Ubuntu 97.3.0-6ubuntu2~24.04) 97.3.0")
    versioned = tmp_path / "gcc-97"
    versioned.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "gcc-97 (Ubuntu 97.2.0-1) 97.2.0"; exit; }\n'
        'exec gcc "$@"\n'
    )
    versioned.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    answer = box.run("--json", "rebuild", "--kernel", K2, PATH=path)
    assert answer.status == 0, answer.out
    log = max((box.root / "var/log/gpuguard").glob(f"build-{K2}-*.log")).read_text()
    assert "CC=gcc-97" in log
    assert "kernel compiled by 97.3.0, this is 97.2.0" in log
    assert "IGNORE_CC_MISMATCH=1" in log


# C33: which kernels, in which order


def test_source_of_another_point_release_is_refused(box: Box) -> None:
    set_userland(box.root, "999.10.04")
    status, code, text = fails_untouched(box, "--kernel", K2)
    assert (status, code) == (69, "source-version-mismatch")
    assert "999.10.01" in text
    assert "999.10.04" in text


def test_without_a_userland_nobody_knows_what_to_build(box: Box) -> None:
    shutil.rmtree(box.root / "usr/lib")
    assert fails_untouched(box, "--kernel", K2)[:2] == (69, "driver-version-unknown")
    box.configure(driver_version=toys.VERSION)
    box.rebuilt("--kernel", K2)


def test_the_tools_that_a_build_needs_are_named(box: Box, tmp_path: Path) -> None:
    have = ("gcc", "tar", "strip", "modprobe", "depmod", "setpriv", "git", "ld", "as")
    for name in have:
        (tmp_path / name).symlink_to(shutil.which(name) or f"/usr/sbin/{name}")
    before = box.snapshot()
    answer = box.run("--json", "plan", "--kernel", K2, PATH=str(tmp_path))
    codes = {b["code"]: b for b in answer.document["steps"][0]["blockers"]}
    assert answer.status == 69
    assert "program-missing" in codes
    assert box.snapshot() == before


def test_git_is_not_needed_for_a_plain_folder(box: Box) -> None:
    command = ["git", "-C", str(box.root / SOURCE), "rev-parse"]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
    box.rebuilt("--kernel", K2)
