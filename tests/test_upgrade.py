"""The maintenance window end to end, with real apt and dpkg on a root of the test's own."""

from __future__ import annotations

import pytest

from tests import toys
from tests.box import K1, K2, SOURCE
from tests.windowbox import NEW_DRIVER, WindowBox

pytestmark = pytest.mark.slow
PIN = "/etc/default/grub.d/zz-gpuguard.cfg"


def new_source(box: WindowBox, version: str) -> None:
    """The operator has fetched the patched source of another driver version."""
    for file in ("version.mk", "kernel-open/Kbuild"):
        path = box.root / SOURCE / file
        path.write_text(path.read_text().replace(toys.VERSION, version))
    for release in (K1, K2):
        box.compile_to(release, seed="newer", version=version)


def test_a_new_kernel_comes_in_a_window_and_is_ready_when_dpkg_is_done(
    window_box: WindowBox,
) -> None:
    box = window_box
    before = box.held()
    automatic = set(box.inside("apt-mark", "showauto").split())
    answer = box.json("upgrade")
    assert answer.status == 0, answer.out + answer.err
    document = answer.document
    assert {(p["name"], p["old"], p["new"]) for p in document["packages"]} >= {
        ("linux-image-generic", "1", "2"),
        (f"linux-image-{K2}", None, "2"),
    }
    assert document["reboot"] == {
        "next": K2, "safe": True, "waiting": True,
        "reasons": [f"the next boot starts {K2}, {K1} is running"],
    }  # fmt: skip
    assert document["window"]["outcome"] == "done"
    assert [phase["phase"] for phase in document["window"]["phases"]] == [
        "lifted", "installing", "rebuilding", "holding", "waiting-for-boot",
    ]  # fmt: skip
    assert box.kernel(K2)["ready"]
    assert box.held() == before | {f"linux-image-{K2}", f"linux-headers-{K2}"}
    # compiled once, before the kernel was installed; and the old kernel was left alone
    assert len(box.build_logs(K2)) == 1
    assert not list(box.path("/var/cache/gpuguard/prebuilt").iterdir())
    # what came by itself still counts so: apt autoremove must find old kernels
    assert set(box.inside("apt-mark", "showauto").split()) == automatic | {
        f"linux-image-{K2}", f"linux-headers-{K2}",
    }  # fmt: skip
    assert box.leftovers() == []
    # once more: nothing to do
    selections = box.packages()
    again = box.json("upgrade")
    assert again.status == 0
    assert again.document["nothing_to_do"]
    assert box.packages() == selections
    assert box.window() is not None  # still waits for its boot


def test_a_dry_run_changes_nothing_and_its_builds_are_used(window_box: WindowBox) -> None:
    box = window_box
    before = box.packages()
    answer = box.json("upgrade", "--dry-run")
    assert answer.status == 1
    assert answer.document["builds"] == [
        {"release": K2, "required": True, "ok": True, "problem": None}
    ]
    assert box.packages() == before
    assert box.window() is None
    assert "window" not in answer.document
    said = box.run("upgrade", "--dry-run", "--no-build")
    assert said.status == 1
    assert "no build was tried" in said.out
    assert box.json("upgrade").status == 0
    assert len(box.build_logs(K2)) == 1
    # and what is not going to be installed is not kept
    assert not list(box.path("/var/cache/gpuguard/prebuilt").iterdir())


def test_a_new_driver_comes_with_the_modules_of_every_kernel(window_box: WindowBox) -> None:
    box = window_box
    box.offer_driver(NEW_DRIVER)
    box.update()
    new_source(box, NEW_DRIVER)
    answer = box.json("upgrade")
    assert answer.status == 0, answer.out + answer.err
    assert answer.document["driver_version"] == NEW_DRIVER
    assert {b["release"]: b["required"] for b in answer.document["builds"]} == {K2: True, K1: False}
    for release in (K1, K2):
        kernel = box.kernel(release)
        assert kernel["ready"], kernel
        assert {m["version"] for m in kernel["modules"]} == {NEW_DRIVER}
    assert len(box.build_logs(K2)) == 1


def test_only_what_is_named_is_upgraded(window_box: WindowBox) -> None:
    box = window_box
    box.offer_driver(NEW_DRIVER)
    box.update()
    answer = box.json("upgrade", "linux-image-generic", "linux-headers-generic")
    assert answer.status == 0, answer.out + answer.err
    installed = box.installed()
    assert installed["linux-image-generic"] == "2"
    assert installed["nvidia-driver"] == f"{toys.VERSION}-1"


def test_packages_besides_those_held_come_by_configuration(window_box: WindowBox) -> None:
    box = window_box
    conf = "etc/gpu-tools.conf"
    kept = {"conffiles": f"/{conf}\n"}
    box.offer("gpu-tools", "1", files={conf: "one\n"}, scripts=kept)
    box.offer("unrelated", "1")
    box.update()
    box.install("gpu-tools", "unrelated")
    box.path(conf).write_text("the operator's\n")
    box.offer("gpu-tools", "2", files={conf: "two\n"}, scripts=kept)
    box.offer("unrelated", "2")
    box.update()
    box.configure(upgrade={"packages": ["gpu-*"]})
    assert box.json("upgrade").status == 0
    installed = box.installed()
    assert (installed["gpu-tools"], installed["unrelated"]) == ("2", "1")
    assert "gpu-tools" not in box.held()
    assert box.path(conf).read_text() == "the operator's\n"


def test_a_hold_of_somebody_else_is_left_alone_and_told(window_box: WindowBox) -> None:
    box = window_box
    assert box.run("unhold", "nvidia-driver").status == 0
    box.inside("apt-mark", "hold", "nvidia-driver")
    box.offer_driver(NEW_DRIVER)
    box.update()
    answer = box.json("upgrade", "--dry-run", "--no-build")
    assert answer.document["foreign_holds"] == ["nvidia-driver"]
    named = box.json("upgrade", "nvidia-driver")
    assert (named.status, named.error["code"]) == (2, "hold-foreign")
    assert "nvidia-driver" in box.held()
    assert box.installed()["nvidia-driver"] == f"{toys.VERSION}-1"


def test_a_kernel_that_fails_after_all_does_not_boot_next(window_box: WindowBox) -> None:
    box = window_box
    box.break_build(K2)
    before = box.held()
    answer = box.json("upgrade", "--no-build")
    document = answer.document
    assert answer.status == 70
    assert [s["error"]["code"] for s in document["steps"] if "error" in s] == ["build-failed"]
    assert document["boot_default"]["action"] == "pin"
    assert document["boot_default"]["release"] == K1
    assert document["reboot"]["next"] == K1
    assert document["reboot"]["safe"] is True
    assert box.held() >= before
    assert box.path(PIN).exists()
    assert "boot-default-pinned" in box.findings()
    # once it compiles, an automatic run lets the new kernel boot
    box.mend_build(K2)
    assert box.json("rebuild", "--force").status == 0
    assert not box.path(PIN).exists()
    assert box.status()["next_kernel"]["release"] == K2


def test_somebody_elses_failing_script_is_told_and_all_is_held_again(
    window_box: WindowBox,
) -> None:
    box = window_box
    box.offer_kernel(
        K2, "2", postinst='#!/bin/sh\n[ -e /etc/mended ] || { echo "othercard does not build" >&2; '
        f"exit 11; }}\ndepmod {K2}\nupdate-grub\n",
    )  # fmt: skip
    box.update()
    before = box.held()
    answer = box.json("upgrade")
    document = answer.document
    assert answer.status == 69
    error = document["errors"][0]
    assert error["code"] == "apt-failed"
    assert "othercard does not build" in error["detail"]
    assert "dpkg --configure -a" in error["hint"]
    assert f"linux-image-{K2}" in document["unfinished"]
    assert document["reboot"]["safe"] is False
    assert document["window"]["outcome"] == "failed"
    assert box.held() >= before
    # no further window while dpkg is not done
    refused = box.json("upgrade")
    assert (refused.status, refused.error["code"]) == (69, "dpkg-unhealthy")
    # what it says is what helps
    box.path("/etc/mended").touch()
    box.inside("dpkg", "--configure", "-a")
    box.rebuilt()
    assert box.kernel(K2)["ready"]
    assert box.status()["next_kernel"]["release"] == K2


def test_a_reboot_of_a_tree_is_refused_before_anything_begins(window_box: WindowBox) -> None:
    before = window_box.packages()
    answer = window_box.run("upgrade", "--reboot")
    assert answer.status == 2
    assert window_box.packages() == before
