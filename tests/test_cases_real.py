"""The same with real kbuild and real dkms: the stand-in, two of Debian's kernels, the program."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuguard.demo import dkms
from gpuguard.demo.headers import HeadersCache
from gpuguard.demo.tree import SOURCE_DIR, boot_into, write_config
from tests import toys
from tests.box import Box
from tests.building import folder_for_others
from tests.kit import base_tree, copy_tree


@pytest.fixture
def real(kernel_headers: HeadersCache) -> Iterator[Box]:
    """Debian's kernels, stock modules by DKMS, the older one runs; nobody compiles."""
    with folder_for_others() as folder:
        box = Box(copy_tree(base_tree(kernel_headers, 2, stock=True), folder / "host"))
        write_config(box.root, {"build": {"user": "nobody"}, "lock_timeout_seconds": 0})
        yield box


def in_staging(box: Box) -> list[psutil.Process]:
    """Compilers at work in the tree's staging folder."""
    staging = str(box.root / "var/cache/gpuguard/staging")
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(staging in word for word in process.info["cmdline"] or [])
    ]


def snapshot(box: Box) -> list[dict[str, str]]:
    """All but the 26,000 files of the headers, which nothing here could mean."""
    return [toys.snapshot(box.root / top) for top in ("lib/modules", "boot", "etc", "srv")]


def kill_in(box: Box, step: str, signum: signal.Signals, *words: str) -> None:
    """Start a rebuild and send a signal when a step begins."""
    process = box.start("rebuild", *words)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"gpuguard: {step}:"):
            break
    while step == "modules" and not in_staging(box):
        time.sleep(0.01)
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == (143 if signum is signal.SIGTERM else -signum)


def test_stopped_killed_rebuilt_and_dkms_cannot_undo_it(
    real: Box, kernel_headers: HeadersCache
) -> None:
    old, new = kernel_headers.releases
    before = snapshot(real)

    kill_in(real, "modules", signal.SIGTERM, "--kernel", new)
    assert in_staging(real) == []
    assert real.leftovers() == []
    assert snapshot(real) == before

    kill_in(real, "modules", signal.SIGKILL, "--kernel", new)
    for process in in_staging(real):
        process.kill()  # on a real machine systemd's: they are in the unit's control group
    assert snapshot(real) == before

    real.rebuilt()
    assert real.leftovers() == []
    assert [k["ready"] for k in real.status()["kernels"]] == [True, True]
    assert real.status()["driver"]["loaded_identity"] == "stock"
    assert real.status()["reboot"] == {
        **real.status()["reboot"],
        "required": True,
        "safe": True,
    }

    dkms.dkms_install(real.root, new)  # forced, as after an update of its package
    assert real.winner(new).startswith(f"/lib/modules/{new}/updates/gpuguard/")
    boot_into(real.root, new)
    status = real.status()
    assert status["driver"]["loaded_identity"] == "patched"
    assert status["kernels"][1]["roles"] == ["running", "next"]
    assert old in [k["release"] for k in status["kernels"]]


def test_a_real_compiler_error_is_shown_with_its_place(
    real: Box, kernel_headers: HeadersCache
) -> None:
    new = kernel_headers.releases[1]
    file = Path(real.path(SOURCE_DIR)) / "kernel-open/nvidia-uvm/uvm.c"
    broken = next(file.parent.glob("*.c")) if not file.exists() else file
    broken.write_text(broken.read_text() + "\nint gone = get_user_pages(1);\n")
    before = snapshot(real)
    answer = real.rebuild("--kernel", new)
    assert (answer.status, answer.error["code"]) == (70, "build-failed")
    assert f"kernel-open/nvidia-uvm/{broken.name}:" in answer.error["message"]
    assert "get_user_pages" in answer.error["message"]
    assert "/var/log/gpuguard/build-" in answer.error["hint"]
    assert snapshot(real) == before
    assert real.leftovers() == []
    assert toys.snapshot(real.root / "var/cache/gpuguard/staging", without=()) == {}
