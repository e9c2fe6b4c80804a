"""What a window refuses before it opens; then every package and every hold is as it was."""

from __future__ import annotations

import fcntl
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpuguard.apply.apt import install, new_log
from gpuguard.errors import LockHeldError
from gpuguard.host import LocalHost
from tests import toys
from tests.box import K1, K2
from tests.windowbox import NEW_DRIVER, WindowBox

pytestmark = pytest.mark.slow


def refused(box: WindowBox, *words: str) -> tuple[int, str, str]:
    """Exit status, code and words of an upgrade that did not take place."""
    before = box.packages()
    answer = box.json("upgrade", *words)
    error = answer.error
    assert box.packages() == before
    assert box.window() is None
    assert error["hint"]
    assert box.leftovers() == []
    assert not list(box.path("/var/cache/gpuguard/scratch").glob("*"))
    return answer.status, error["code"], f"{error['message']}\n{error['detail']}"


def test_no_patched_source_for_the_candidate_driver(window_box: WindowBox) -> None:
    box = window_box
    box.offer_driver(NEW_DRIVER)
    box.update()
    status, code, words = refused(box)
    assert (status, code) == (69, "source-version-mismatch")
    assert NEW_DRIVER in words
    assert toys.VERSION in words


def test_the_patched_tree_does_not_compile_for_the_candidate_kernel(window_box: WindowBox) -> None:
    box = window_box
    box.break_build(K2)
    status, code, words = refused(box)
    assert (status, code) == (70, "build-failed")
    assert K2 in words
    plan = box.json("upgrade", "--dry-run")
    assert plan.status == 70
    assert [r["code"] for r in plan.document["refusals"]] == ["build-failed"]
    assert "REFUSED" in box.run("upgrade", "--dry-run").out


def test_a_patch_that_does_not_apply_to_the_candidate(window_box: WindowBox) -> None:
    box = window_box
    patch = box.path("/srv/nvidia/p2p.patch")
    text = re.sub(r"^-(?!--).*$", "-what no source has", patch.read_text(), count=1, flags=re.M)
    patch.write_text(text)
    status, code, _ = refused(box)
    assert (status, code) == (65, "patch-rejected")


def test_a_kernel_without_its_headers(window_box: WindowBox) -> None:
    box = window_box
    box.offer_kernel("6.8.0-101-generic", "3", headers=False)
    box.update()
    status, code, words = refused(box)
    assert (status, code) == (69, "upgrade-without-headers")
    assert "6.8.0-101-generic" in words


def test_packages_would_be_removed_that_are_none_of_its_business(window_box: WindowBox) -> None:
    box = window_box
    box.offer("precious", "1")
    box.offer("linux-image-generic", "3", depends=f"linux-image-{K2}", conflicts="precious")
    box.update()
    box.install("precious")
    status, code, words = refused(box)
    assert (status, code) == (69, "upgrade-removes")
    assert "precious" in words
    assert box.json("upgrade", "--allow-removals").status == 0
    assert "precious" not in box.installed()


def test_a_foreign_hold_in_the_way(window_box: WindowBox) -> None:
    box = window_box
    assert box.run("unhold", "linux-kbuild-6.8").status == 0
    box.inside("apt-mark", "hold", "linux-kbuild-6.8")
    status, code, words = refused(box)
    assert (status, code) == (69, "apt-plan-failed")
    assert "linux-kbuild-6.8" in words


def test_a_driver_version_in_the_configuration(window_box: WindowBox) -> None:
    box = window_box
    box.configure(driver_version=toys.VERSION)
    box.offer_driver(NEW_DRIVER)
    box.update()
    assert refused(box)[:2] == (78, "driver-version-pinned")


def test_packages_that_cannot_be_fetched(window_box: WindowBox) -> None:
    box = window_box
    box.path(f"/srv/repo/linux-image-{K2}_2.deb").unlink()
    assert refused(box)[:2] == (69, "packages-download")


def test_headers_that_cannot_be_fetched(window_box: WindowBox) -> None:
    box = window_box
    box.path(f"/srv/repo/linux-headers-{K2}_2.deb").write_bytes(b"not what the index says")
    assert refused(box)[0] == 69


def test_a_name_that_is_none(window_box: WindowBox) -> None:
    assert refused(window_box, "--", "-o=Dir=/")[:2] == (2, "usage")
    assert refused(window_box, "no-such-package")[:2] == (69, "apt-plan-failed")


def test_somebody_elses_apt_is_at_work(window_box: WindowBox) -> None:
    box = window_box
    with dpkg_locked(box):
        before = box.packages()
        answer = box.json("upgrade")
    assert (answer.status, answer.error["code"]) == (75, "lock-held")
    assert box.packages() == before
    assert box.path("/var/lib/dpkg/lock-frontend").exists()


def test_somebody_elses_apt_comes_in_between(window_box: WindowBox) -> None:
    host = LocalHost(window_box.root)
    log = new_log(host, "test")
    with dpkg_locked(window_box), pytest.raises(LockHeldError):
        install(
            host, ("linux-kbuild-6.8",), log,
            lock_timeout=1, on_line=lambda _: None, on_signal=lambda: None,
        )  # fmt: skip
    assert window_box.installed()["linux-kbuild-6.8"] == "1"


def test_a_second_window_at_the_same_time(window_box: WindowBox) -> None:
    box = window_box
    descriptor = os.open(box.path("/var/lib/gpuguard/lock"), os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        answer = box.json("upgrade")
        assert (answer.status, answer.error["code"]) == (75, "lock-held")
        assert box.json("upgrade", "--dry-run").error["code"] == "lock-held"
    finally:
        os.close(descriptor)
    assert box.installed()[f"linux-image-{K1}"] == "1"


@contextmanager
def dpkg_locked(box: WindowBox) -> Iterator[None]:
    descriptor = os.open(box.path("/var/lib/dpkg/lock-frontend"), os.O_RDWR | os.O_CREAT, 0o640)
    # as apt does, from another process than the one that looks: a child of ours
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        os.write(writer, b"x")
        signal.pause()
        os._exit(0)
    os.read(reader, 1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for each in (reader, writer, descriptor):
            os.close(each)
