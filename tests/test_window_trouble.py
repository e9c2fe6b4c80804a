"""A window in trouble: full disks, scripts that fail, boots of another kernel, odd names."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuguard.host import LocalHost
from gpuguard.verbs.window import close_after_boot
from gpuguard.window import Phase, Window, write_window
from tests import toys
from tests.box import K1, K2, read_only
from tests.windowbox import WindowBox, _architecture

pytestmark = pytest.mark.slow
LOGS = "/var/log/gpuguard"
K3 = "6.8.0-101-generic"


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_log_disk_that_fills_up_costs_the_log_alone(window_box: WindowBox) -> None:
    box = window_box
    fill = f"dd if=/dev/zero of={LOGS}/fill bs=64k 2>/dev/null || :; seq 20000"
    box.offer_kernel(K2, "2", preinst=f"#!/bin/sh\nset -e\n{fill}\n")
    box.update()
    before = box.held()
    with small_disk(box.path(LOGS), "12m"):
        answer = box.json("upgrade")
        document = answer.document
        assert box.path(f"{LOGS}/fill").stat().st_size > 8 << 20
    assert document["unfinished"] == ""
    assert document["errors"] == []
    assert box.installed()["linux-image-generic"] == "2"
    assert box.inside("dpkg", "--audit") == ""
    assert box.held() >= before | {f"linux-image-{K2}"}


def test_no_room_for_the_log_is_told_before(window_box: WindowBox) -> None:
    box = window_box
    before = box.packages()
    with small_disk(box.path(LOGS), "4m"):
        answer = box.json("upgrade")
    assert (answer.status, answer.error["code"]) == (69, "disk-space")
    assert LOGS in answer.error["message"]
    assert box.packages() == before


def test_logs_that_cannot_be_written_are_told_before(window_box: WindowBox) -> None:
    box = window_box
    before = box.packages()
    with read_only(box.path(LOGS)):
        answer = box.json("upgrade", "--no-build")
    assert (answer.status, answer.error["code"]) == (74, "state-unwritable")
    assert LOGS in answer.error["hint"]
    assert box.packages() == before
    assert box.window() is None


def test_a_full_disk_is_named_as_the_cause(window_box: WindowBox) -> None:
    box = window_box
    box.offer_kernel(K2, "2", preinst="#!/bin/sh\nset -e\ncat /etc/passwd >/dev/full\n")
    box.update()
    error = box.json("upgrade").document["errors"][0]
    assert error["code"] == "apt-failed"
    assert "full" in error["message"]
    assert "df -h" in error["hint"]


def test_what_apt_left_half_done_is_finished_before_it_is_held(window_box: WindowBox) -> None:
    box = window_box
    once = "#!/bin/sh\n[ -e /etc/once ] || { touch /etc/once; exit 1; }\n"
    box.offer_kernel(K2, "2", preinst=once)
    box.update()
    answer = box.json("upgrade")
    document = answer.document
    assert [error["code"] for error in document["errors"]] == ["apt-failed"]
    assert document["unfinished"] == ""
    assert box.installed()["linux-image-generic"] == "2"
    assert box.kernel(K2)["ready"]
    assert f"linux-image-{K2}" in box.held()
    assert f"linux-image-{K2}" in box.inside("apt-mark", "showauto").split()
    log = box.path(document["window"]["log"]).read_text().splitlines()
    assert log.count("Unpacking linux-image-generic (2) over (1) ...") == 1
    assert box.json("upgrade").document["nothing_to_do"]


def test_what_cannot_be_finished_comes_with_the_way_out(window_box: WindowBox) -> None:
    box = window_box
    box.offer_kernel(K2, "2", preinst="#!/bin/sh\n[ -e /etc/mended ]\n")
    box.update()
    before = box.held()
    document = box.json("upgrade").document
    assert document["unfinished"]
    assert box.held() >= before
    refused = box.json("upgrade")
    assert (refused.status, refused.error["code"]) == (69, "dpkg-unhealthy")
    steps = refused.error["hint"].splitlines()[-3:]
    assert [line.split()[1] for line in steps] == ["gpuguard", "dpkg", "gpuguard"]
    assert steps == document["errors"][0]["hint"].splitlines()[1:4]
    # on hold, apt does not mend it; so the sequence, word by word
    box.path("/etc/mended").touch()
    assert box.run("unhold").status == 0
    box.inside("dpkg", "--configure", "-a", check=False)
    box.inside("apt-get", "--fix-broken", "install", "-y", "-q")
    assert box.run("hold").status == 0
    assert box.inside("dpkg", "--audit") == ""
    box.rebuilt()
    assert box.kernel(K2)["ready"]


def test_a_boot_into_the_old_kernel_proves_nothing(window_box: WindowBox) -> None:
    box = window_box
    assert box.json("upgrade").status == 0
    window = box.window()
    assert window is not None
    assert window["awaits_kernels"] == [K2]
    host = LocalHost(box.root)
    box.reboot(K1)
    boots = []
    for _ in range(2):  # the gate runs twice in this boot
        still = close_after_boot(host, "ok", {"kernel": K1})
        assert still is not None
        assert still.phase is Phase.WAITING
        assert still.verdict is None
        boots = [boot.release for boot in still.boots]
    assert boots == [K1]
    said = box.run("verify", "--gate")
    assert "stays open" in said.out + said.err
    assert K2 in said.out + said.err
    box.reboot(K2)
    closed = close_after_boot(host, "ok", {"kernel": K2})
    assert closed is not None
    assert closed.phase is Phase.CLOSED
    assert [boot["release"] for boot in box.windows()[0]["boots"]] == [K1]


def test_a_boot_with_the_old_driver_proves_nothing(window_box: WindowBox) -> None:
    box, host = window_box, LocalHost(window_box.root)
    window = Window(id="1", started="2026-01-01T00:00:00Z", boot_id="x", awaits_driver="999.20.01")
    write_window(host, window.entering(Phase.WAITING, window.started))
    version = box.path("/proc/driver/nvidia/version")
    version.parent.mkdir(parents=True, exist_ok=True)
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (a@b)\n"
    for loaded, phase in ((toys.VERSION, Phase.WAITING), ("999.20.01", Phase.CLOSED)):
        version.write_text(line.format(loaded))
        found = close_after_boot(host, "ok", None)
        assert found is not None
        assert found.phase is phase


def test_a_second_window_that_brings_nothing_lets_the_first_wait(window_box: WindowBox) -> None:
    box = window_box
    assert box.json("upgrade").status == 0
    first = box.window()
    assert first is not None
    box.offer_kernel(K3, "3", preinst="#!/bin/sh\nexit 1\n")
    box.compile_to(K3)
    box.update()
    assert box.json("upgrade").document["window"]["outcome"] == "failed"
    assert box.window() == first
    assert [w["outcome"] for w in box.windows()] == ["failed", "done"]


def test_without_lists_nobody_can_say_that_nothing_is_new(window_box: WindowBox) -> None:
    box = window_box
    assert "apt's lists were fetched: 20" in box.run("upgrade", "-n", "--no-build").out
    assert box.json("upgrade", "-n", "--no-build").document["lists_updated"]
    for path in box.path("/var/lib/apt/lists").iterdir():
        if not path.is_dir():
            path.unlink()
    answer = box.json("upgrade")
    assert (answer.status, answer.error["code"]) == (69, "apt-lists-missing")
    assert "apt-get update" in answer.error["hint"]


def test_names_as_dpkg_prints_them(window_box: WindowBox) -> None:
    box, arch = window_box, _architecture()
    for words in (
        (f"linux-image-generic:{arch}", f"linux-headers-generic:{arch}"),
        (f"linux-image-generic:{arch}=2", "linux-headers-generic=2"),
    ):
        answer = box.json("upgrade", "-n", "--no-build", *words)
        assert answer.status == 1, answer.out
        assert answer.document["new_kernels"] == [K2]
    for sign in "+-":
        answer = box.json("upgrade", f"linux-image-generic{sign}")
        assert (answer.status, answer.error["code"]) == (2, "usage")
    box.inside("apt-mark", "hold", "linux-kbuild-6.8")
    assert box.run("unhold", f"linux-kbuild-6.8:{arch}").status == 0
    box.inside("apt-mark", "hold", "linux-kbuild-6.8")
    answer = box.json("upgrade", f"linux-kbuild-6.8:{arch}")
    assert (answer.status, answer.error["code"]) == (2, "hold-foreign")


def test_a_name_that_stands_for_other_packages(window_box: WindowBox) -> None:
    box = window_box
    box.offer("mailer", "1", provides="mail-agent")
    box.update()
    answer = box.json("upgrade", "mail-agent")
    assert (answer.status, answer.error["code"]) == (2, "package-unknown")


def test_the_image_alone_names_the_headers_of_its_flavour(window_box: WindowBox) -> None:
    answer = window_box.json("upgrade", "linux-image-generic")
    assert answer.error["code"] == "upgrade-without-headers"
    assert "linux-headers-generic" in answer.error["hint"]
    assert "without names" in answer.error["hint"]
