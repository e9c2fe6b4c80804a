"""Every way out of a maintenance window: all is held again, and its record is closed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gpuguard.host import LocalHost
from gpuguard.verbs.holds import lift_for_window
from gpuguard.verbs.window import close_after_boot
from gpuguard.window import Phase, Window, write_window
from tests.box import K1, K2, SOURCE
from tests.windowbox import WindowBox

pytestmark = pytest.mark.slow
_SECONDS = 120


class Gate:
    """Two pipes: a program inside says that it has come, and waits to be let on."""

    def __init__(self, box: WindowBox) -> None:
        self.came, self.go = box.path("/run/came"), box.path("/run/go")
        for pipe in (self.came, self.go):
            os.mkfifo(pipe)
            pipe.chmod(0o666)

    def shell(self, root: str = "") -> str:
        return f"echo come >{root}/run/came; read word <{root}/run/go"

    def wait(self) -> None:
        assert self.came.read_text() == "come\n"

    def open(self) -> None:
        self.go.write_text("go\n")


@pytest.fixture
def gate(window_box: WindowBox) -> Gate:
    return Gate(window_box)


def in_dpkg(box: WindowBox, gate: Gate) -> subprocess.Popen[str]:
    """A window that is held up in the middle of dpkg."""
    box.offer_kernel(K2, "2", preinst=f"#!/bin/sh\n{gate.shell()}\n")
    box.update()
    process = box.start("upgrade")
    gate.wait()
    record = box.window()
    assert record is not None
    assert record["phase"] == "installing"
    return process


def in_rebuild(box: WindowBox, gate: Gate) -> subprocess.Popen[str]:
    """A window that is held up while it compiles."""
    makefile = box.root / SOURCE / "kernel-open/Makefile"
    text = makefile.read_text()
    makefile.write_text(text.replace("\t@cp ", f"\t@{gate.shell(str(box.root))}; cp ", 1))
    process = box.start("upgrade", "--no-build")
    gate.wait()
    makefile.write_text(text)
    record = box.window()
    assert record is not None
    assert record["phase"] == "rebuilding"
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=_SECONDS)
    return process.returncode, out + err


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=_SECONDS)


def held_again_at_next_start(box: WindowBox, *verb: str) -> None:
    """Before: holds are off. After the verb: all that was on hold is, and the new kernel too."""
    before = box.path("/var/lib/gpuguard/holds.json").read_text()
    ours = set(json.loads(before)["packages"])
    assert not box.held()
    assert "window-interrupted" in box.findings()
    answer = box.run(*verb)
    assert "maintenance window" in answer.err
    assert box.held() >= ours
    assert "window-interrupted" not in box.findings()


def test_killed_while_dpkg_works(window_box: WindowBox, gate: Gate) -> None:
    box = window_box
    process = in_dpkg(box, gate)
    queue = box.path("/var/lib/gpuguard/rebuild-wanted")
    assert queue.exists()  # whoever waits for our lock holds again
    kill(process)
    assert queue.exists()
    gate.open()  # dpkg has outlived us, and goes on to its end
    box.configure(lock_timeout_seconds=_SECONDS)
    held_again_at_next_start(box, "rebuild")
    assert box.installed()[f"linux-image-{K2}"] == "2"
    assert box.installed()["linux-image-generic"] == "2"
    assert box.kernel(K2)["ready"]
    assert f"linux-image-{K2}" in box.held()
    record = box.window()
    assert record is not None
    assert (record["phase"], record["outcome"]) == ("waiting-for-boot", "interrupted")
    assert "installing" in record["message"]


def test_the_power_fails_while_dpkg_works(window_box: WindowBox, gate: Gate) -> None:
    box = window_box
    once = f"[ -e /etc/once ] || {{ touch /etc/once; {gate.shell()}; }}"
    postinst = f"#!/bin/sh\n{once}\nupdate-grub\n"
    box.offer_kernel(K2, "2", postinst=postinst)
    box.update()
    process = box.start("upgrade")
    gate.wait()
    kill(process)
    kill_all_inside(box)
    held_again_at_next_start(box, "rebuild")
    # apt was let finish before all was held again: on hold, it could not
    assert box.inside("dpkg", "--audit") == ""
    assert box.installed()["linux-image-generic"] == "2"
    assert box.kernel(K2)["ready"]
    record = box.window()
    assert record is not None
    assert record["unfinished"] == ""


def kill_all_inside(box: WindowBox) -> None:
    """Every process of the root: apt, dpkg, and what they run."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and (entry / "root").readlink() == box.root:
                os.kill(int(entry.name), signal.SIGKILL)


def test_killed_while_it_rebuilds(window_box: WindowBox, gate: Gate) -> None:
    box = window_box
    kill(in_rebuild(box, gate))
    held_again_at_next_start(box, "rebuild")
    assert box.kernel(K2)["ready"]
    assert [window["outcome"] for window in box.windows()] == ["interrupted"]


@pytest.mark.parametrize("phase", [Phase.LIFTED, Phase.HOLDING])
def test_killed_before_or_after_the_work(window_box: WindowBox, phase: Phase) -> None:
    box = window_box
    host = LocalHost(box.root)
    window = Window(id="20260101T000000Z", started="2026-01-01T00:00:00Z")
    write_window(host, window.entering(phase, window.started))
    lift_for_window(host)
    held_again_at_next_start(box, "rebuild")
    assert box.window() is None  # nothing was installed: nothing waits for a boot
    assert [(w["outcome"], w["phase"]) for w in box.windows()] == [("interrupted", "closed")]


def test_any_verb_that_changes_the_host_holds_again(window_box: WindowBox) -> None:
    box = window_box
    host = LocalHost(box.root)
    window = Window(id="20260101T000000Z", started="2026-01-01T00:00:00Z")
    for verb in (("rebuild", "--automatic"), ("rollback", "--stock"), ("hold",), ("upgrade",)):
        write_window(host, window.entering(Phase.LIFTED, window.started))
        lift_for_window(host)
        held_again_at_next_start(box, *verb)


def test_killed_in_the_preflight(window_box: WindowBox, gate: Gate) -> None:
    box = window_box
    makefile = box.root / SOURCE / "kernel-open/Makefile"
    text = makefile.read_text()
    makefile.write_text(text.replace("\t@cp ", f"\t@{gate.shell(str(box.root))}; cp ", 1))
    before = box.packages()
    process = box.start("upgrade")
    gate.wait()
    assert box.status()["window"]["phase"] == "preflight"
    kill(process)
    makefile.write_text(text)
    assert box.packages() == before
    answer = box.run("rebuild")
    assert "before it changed anything" in answer.err
    assert box.window() is None
    assert box.windows() == []
    assert box.json("upgrade").status == 0  # scratch and staging of the dead are swept
    assert box.leftovers() == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_dpkg_finish(window_box: WindowBox, gate: Gate, signum: int) -> None:
    box = window_box
    before = box.held()
    process = in_dpkg(box, gate)
    process.send_signal(signum)
    assert "dpkg is let finish" in read_until(process, "dpkg is let finish")
    process.send_signal(signum)  # people press it twice
    gate.open()
    status, said = end(process)
    assert status == 128 + signum
    assert f"next boot: {K1}, safe" in said  # not built yet, and kept from booting
    assert "gpuguard rebuild" in said
    assert "on hold again" in said
    assert "is undone" not in said
    assert box.installed()["linux-image-generic"] == "2"
    assert box.held() >= before | {f"linux-image-{K2}"}
    record = box.window()
    assert record is not None
    assert (record["phase"], record["outcome"]) == ("waiting-for-boot", "interrupted")
    assert box.run("rebuild").status == 0
    assert box.kernel(K2)["ready"]


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if words in line:
            break
    return said


def test_a_signal_while_it_rebuilds(window_box: WindowBox, gate: Gate) -> None:
    box = window_box
    before = box.held()
    process = in_rebuild(box, gate)
    process.send_signal(signal.SIGTERM)
    status, _ = end(process)
    assert status == 128 + signal.SIGTERM
    assert box.held() >= before | {f"linux-image-{K2}"}
    # what is not ready does not boot
    status_ = box.status()
    assert status_["next_kernel"]["release"] == K1
    assert status_["reboot"]["safe"]
    assert box.leftovers() == []
    box.rebuilt()
    assert box.status()["next_kernel"]["release"] == K2


def test_the_boot_closes_the_record(window_box: WindowBox) -> None:
    box = window_box
    assert box.json("upgrade").status == 0
    host = LocalHost(box.root)
    assert close_after_boot(host, "ok", None) is None  # verified by hand, still the old boot
    box.reboot(K2)
    closed = close_after_boot(host, "ok", {"kernel": K2, "pairs": 12})
    assert closed is not None
    assert box.window() is None
    (window,) = box.windows()
    assert (window["phase"], window["outcome"], window["verdict"]) == ("closed", "done", "ok")
    assert window["proof"] == {"kernel": K2, "pairs": 12}
    assert {"name": "linux-image-generic", "old": "1", "new": "2"} in window["changes"]
    assert "ok" in box.run("upgrade", "--history").out
    assert close_after_boot(host, "ok", None) is None


def test_the_gate_closes_the_record(window_box: WindowBox) -> None:
    box = window_box
    assert box.json("upgrade").status == 0
    box.reboot(K2)
    box.run("verify", "--gate")  # without a card: whatever it says, the boot has come
    assert box.window() is None
    assert box.windows()[0]["verdict"]


def test_a_second_window_before_the_boot_follows_the_first(window_box: WindowBox) -> None:
    box = window_box
    assert box.json("upgrade").status == 0
    first = box.window()
    assert first is not None
    box.offer_kernel("6.8.0-101-generic", "3")
    box.compile_to("6.8.0-101-generic")
    box.update()
    assert box.json("upgrade", "no-such-package").status == 69
    assert box.window() == first  # what was refused takes nothing's place
    assert box.json("upgrade").status == 0
    second = box.window()
    assert second is not None
    assert second["next_release"] == "6.8.0-101-generic"
    assert [w["id"] for w in box.windows()] == [first["id"], second["id"]]
    assert second["id"] in box.windows()[0]["message"]


def edited(box: WindowBox, change: Callable[[dict[str, object]], None]) -> None:
    file: Path = box.path("/var/lib/gpuguard/window.json")
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def test_a_window_that_nobody_reboots_for_is_told(window_box: WindowBox) -> None:
    box = window_box
    assert box.json("upgrade").status == 0
    assert "window-waits-for-boot" not in box.findings()
    edited(box, lambda d: d["phases"][-1].update(at="2020-01-01T00:00:00Z"))  # type: ignore[index]
    assert "days" in box.findings()["window-waits-for-boot"]["message"]
    assert box.status()["window"]["phase"] == "waiting-for-boot"


@pytest.mark.parametrize("content", ["", "{", '{"schema": 99}', '{"schema": 1, "phase": "tea"}'])
def test_a_record_that_cannot_be_read_stops_no_rebuild(window_box: WindowBox, content: str) -> None:
    box = window_box
    box.path("/var/lib/gpuguard/window.json").write_text(content)
    assert box.findings()["window-unreadable"]["severity"] == "unknown"
    answer = box.run("rebuild")
    assert answer.status == 0
    assert "window-unreadable" in answer.err
    refused = box.json("upgrade")
    assert (refused.status, refused.error["code"]) == (74, "window-unreadable")


def test_holding_again_that_fails_is_tried_at_the_next_start(window_box: WindowBox) -> None:
    box = window_box
    host = LocalHost(box.root)
    window = Window(id="20260101T000000Z", started="2026-01-01T00:00:00Z")
    write_window(host, window.entering(Phase.LIFTED, window.started))
    lift_for_window(host)
    ledger = box.path("/var/lib/gpuguard/holds.json")
    good = ledger.read_text()
    ledger.write_text("{")
    answer = box.run("rebuild")
    assert answer.status == 0
    assert "could not be closed" in answer.err
    ledger.write_text(good)
    assert not box.held()
    box.run("rebuild")
    assert box.held()
    assert box.window() is None
