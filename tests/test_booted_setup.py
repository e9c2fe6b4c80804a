"""What set-up leaves on a live system: units that come back, nothing that breaks others.

Stages of one story in a booted Debian, in this order; the removal is the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.booted import Machine
from tests.booted_roots import PROGRAM, RELEASES
from tests.booted_story import QUEUE, REBUILD, is_idle, story_machine, wait_until_idle

pytestmark = pytest.mark.slow

REBUILD_PATH = "gpuguard-rebuild.path"
GATE = "gpuguard-verify.service"
HOLD = "gpuguard-hold-reboot.service"
UNITS = "/etc/systemd/system"


@pytest.fixture(scope="module", params=RELEASES, ids=lambda debian: debian.suite)
def system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    yield from story_machine(request.param, tmp_path_factory.mktemp(f"setup-{request.param.suite}"))


def drop_in(system: Machine, unit: str, text: str) -> Path:
    file = system.path(f"{UNITS}/{unit}.d/test.conf")
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    system.systemctl("daemon-reload")
    return file


def test_a_set_up_before_the_first_rebuild_leaves_the_gate_to_the_next_boot(
    system: Machine,
) -> None:
    system.run("mkdir", "-m", "777", "/run/gpuguard")
    done = system.gpuguard("setup")
    assert done.returncode == 0, done.stdout + done.stderr
    assert system.show("gpuguard-verify.timer", "ActiveState") == "inactive"
    assert system.systemctl("is-enabled", "gpuguard-verify.timer") == "enabled"
    assert "automation-off" not in {f["code"] for f in system.status()["findings"]}
    assert system.run("stat", "-c", "%a %U", "/run/gpuguard").stdout == "755 root\n"


def test_a_module_that_is_gone_fails_and_does_not_end_the_path_unit(system: Machine) -> None:
    """Python's exit status is 1 then, as gpuguard's is for a kernel that is not ready."""
    (package,) = system.path(str(Path(PROGRAM).parents[1])).glob("lib/python*/site-packages")
    gone = package / "gpuguard"
    gone.rename(gone.with_name("gone"))
    try:
        system.run("touch", QUEUE)
        system.wait_for(lambda: system.show(REBUILD, "ActiveState") == "failed", 60, "it fails")
        wait_until_idle(system)
        assert system.show(REBUILD, "Result") == "exit-code"
        assert system.show(REBUILD_PATH, "ActiveState") == "active"
    finally:
        gone.with_name("gone").rename(gone)
    system.run("touch", QUEUE)
    system.wait_for(lambda: is_idle(system), 240, "the request is taken")


def test_a_path_unit_that_has_failed_lives_again_with_the_next_run(system: Machine) -> None:
    """As the timer starts it, at the latest after six hours."""
    bad = drop_in(system, REBUILD, "[Service]\nExecStart=\nExecStart=false\nExecStopPost=\n")
    system.run("touch", QUEUE)
    system.wait_for(
        lambda: system.show(REBUILD_PATH, "ActiveState") == "failed", 60, "systemd gives it up"
    )
    bad.unlink()
    system.systemctl("daemon-reload")
    system.systemctl("reset-failed", REBUILD)  # in place of the minute for which starts count
    system.systemctl("start", REBUILD, check=False)
    system.wait_for(lambda: system.show(REBUILD_PATH, "ActiveState") == "active", 60, "it lives")
    wait_until_idle(system)
    assert system.show(REBUILD_PATH, "ActiveState") == "active"


def test_a_request_that_cannot_be_removed_does_not_end_the_path_unit(system: Machine) -> None:
    folder = str(Path(QUEUE).parent)
    system.run("sh", "-c", f"touch {QUEUE}; mount --bind -o ro {folder} {folder}")
    try:
        system.wait_for(
            lambda: system.show(REBUILD, "SubState") == "stop-post", 60, "it waits at its end"
        )
        assert system.show(REBUILD_PATH, "ActiveState") == "active"
        assert system.path(QUEUE).exists()
    finally:
        system.run("umount", folder)
    system.systemctl("kill", "--signal=KILL", REBUILD)  # the wait
    wait_until_idle(system)
    assert system.show(REBUILD_PATH, "ActiveState") == "active"


def test_a_reboot_is_held_with_a_reason_and_nothing_else_from_its_file(system: Machine) -> None:
    file = system.live_path("/run/gpuguard/hold-reboot.env")
    file.write_text('WHY="not \\"ready\\": 100% \\$HOME"\nSECONDS=600\nLD_PRELOAD=/tmp/evil.so\n')
    system.systemctl("start", HOLD)
    system.wait_for(
        lambda: 'not "ready": 100% $HOME' in system.run("systemd-inhibit", "--list").stdout,
        30, "the reason is listed",
    )  # fmt: skip
    pid = system.show(HOLD, "MainPID")
    assert "LD_PRELOAD" not in system.run("cat", f"/proc/{pid}/environ").stdout
    assert system.systemctl("is-active", HOLD) == "active"


def test_a_removal_names_what_needs_the_gate_and_stops_nothing(system: Machine) -> None:
    drop_in(system, GATE, "[Service]\nExecStart=\nExecStart=true\n")
    system.path(f"{UNITS}/vllm.service").write_text(
        f"[Unit]\nRequires={GATE}\nAfter={GATE}\n[Service]\nExecStart=sleep infinity\n"
    )
    system.systemctl("daemon-reload")
    system.systemctl("start", "vllm.service")
    refused = system.gpuguard("setup", "--remove")
    assert refused.returncode == 69
    assert f"vllm.service needs {GATE} ({UNITS}/vllm.service)" in refused.stderr
    assert system.systemctl("is-active", "vllm.service", HOLD).split() == ["active", "active"]
    pin = system.path("/etc/default/grub.d/zz-gpuguard.cfg")
    pin.parent.mkdir(exist_ok=True)
    pin.write_text(f"# gpuguard keeps {system.base.old} the boot default: test\nGRUB_DEFAULT=x\n")
    system.run("update-grub")
    assert 'default="x"' in system.path("/boot/grub/grub.cfg").read_text()
    done = system.gpuguard("setup", "--remove", "--force")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"breaks   vllm.service needs {GATE}" in done.stdout
    assert system.systemctl("is-active", "vllm.service") == "active"
    assert system.show(HOLD, "ActiveState") == "inactive"
    assert not system.live_path("/run/gpuguard/hold-reboot.env").exists()
    assert not pin.exists()
    assert 'default="x"' not in system.path("/boot/grub/grub.cfg").read_text()
