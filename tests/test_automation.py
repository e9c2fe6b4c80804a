"""Does gpuguard still work by itself: the self-check behind ``status``."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuguard.core.automation import STALE_SECONDS, AutomationFacts, automation_findings
from gpuguard.core.findings import Severity
from gpuguard.core.setup import UNIT_DIR
from gpuguard.state import SETUP_FILE
from tests.box import Box
from tests.setupbox import needs_systemctl

PROGRAM = "/opt/gpuguard/bin/gpuguard"
CODES = {"hook-dead", "automation-off", "automation-stale", "automation-unknown"}
HOOKS = (
    "/usr/local/lib/gpuguard/apt-hook",
    "/usr/local/lib/gpuguard/apt-check",
    "/etc/kernel/postinst.d/dkms-gpuguard",
    "/etc/kernel/header_postinst.d/dkms-gpuguard",
    "/etc/kernel/postrm.d/dkms-gpuguard",
)


@pytest.fixture
def host(box: Box) -> Box:
    """A tree on which the real ``gpuguard setup`` has been run."""
    program = box.path(PROGRAM)
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    answer = box.run("setup", "--program", PROGRAM)
    assert answer.status == 0, answer.err
    return box


def found(host: Box) -> dict[str, dict[str, Any]]:
    return {code: finding for code, finding in host.findings().items() if code in CODES}


def test_where_nothing_was_set_up_nothing_is_said(box: Box) -> None:
    assert found(box) == {}


def test_a_set_up_host_is_fine(host: Box) -> None:
    assert found(host) == {}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("damage", ["missing", "not executable", "changed"])
def test_a_hook_that_is_there_but_dead_is_noticed(host: Box, hook: str, damage: str) -> None:
    file = host.path(hook)
    match damage:
        case "missing":
            file.unlink()
        case "not executable":
            file.chmod(0o644)
        case "changed":
            file.write_text("#!/bin/sh\nexit 0\n")
    finding = found(host)["hook-dead"]
    assert finding["severity"] == "warning"
    assert finding["evidence"] == {hook: damage}
    # and the remedy that it names works
    words = finding["remedy"].removeprefix("gpuguard ").split()
    assert host.run(*words, "--program", PROGRAM).status == 0
    assert found(host) == {}


def test_so_is_apts_own_line_without_the_hook(host: Box) -> None:
    host.path("/etc/apt/apt.conf.d/99gpuguard").write_text("// nothing\n")
    assert set(found(host)) == {"hook-dead"}


@pytest.mark.parametrize("damage", ["gone", "not executable"])
def test_so_is_a_program_that_hooks_cannot_call(host: Box, damage: str) -> None:
    program = host.path(PROGRAM)
    if damage == "gone":
        program.unlink()
    else:
        program.chmod(0o644)
    assert PROGRAM in found(host)["hook-dead"]["message"]


def test_a_disabled_unit_is_noticed(host: Box) -> None:
    needs_systemctl()
    done = subprocess.run(
        ["systemctl", f"--root={host.root}", "disable", "gpuguard-rebuild.path"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    finding = found(host)["automation-off"]
    assert finding["evidence"] == {"gpuguard-rebuild.path": "disabled"}
    assert finding["remedy"] == "gpuguard setup --force"


def test_units_that_the_operator_changed_are_his_business(host: Box) -> None:
    host.path(f"{UNIT_DIR}/gpuguard-rebuild.timer").write_text("[Timer]\nOnCalendar=daily\n")
    assert found(host) == {}


def test_without_a_configuration_nothing_is_rebuilt(host: Box) -> None:
    host.path("/etc/gpuguard/gpuguard.yaml").unlink()
    finding = found(host)["automation-off"]
    assert finding["remedy"] == "gpuguard config init"
    folder = host.path("/etc/gpuguard/gpuguard.d")
    folder.mkdir()
    (folder / "all.yaml").write_text("source: {path: /srv/nvidia}\n")
    assert found(host) == {}


def test_a_record_that_cannot_be_read_is_not_fine(host: Box) -> None:
    host.path(SETUP_FILE).write_text("{")
    finding = found(host)["automation-unknown"]
    assert finding["severity"] == "unknown"
    assert SETUP_FILE in finding["message"]


def test_an_ordinary_user_sees_the_same(host: Box) -> None:
    host.path(HOOKS[0]).chmod(0o644)
    answer = host.run("status", user="nobody")
    assert "[hook-dead]" in answer.out


# --- what only a running system tells -----------------------------------------------------


def codes(**facts: Any) -> dict[str, str]:
    return {f.code: f.message for f in automation_findings(AutomationFacts(**facts))}


def test_a_unit_that_does_not_run_is_noticed() -> None:
    said = codes(stopped=(("gpuguard-rebuild.path", "failed"),))
    assert "gpuguard-rebuild.path is failed" in said["automation-off"]


HOUR = 3600.0


@pytest.mark.parametrize(
    ("facts", "is_stale"),
    [
        ({"idle_seconds": STALE_SECONDS, "up_seconds": 30 * HOUR}, True),
        ({"idle_seconds": STALE_SECONDS - 1, "up_seconds": 30 * HOUR}, False),
        ({"idle_seconds": 900 * HOUR, "up_seconds": 600.0}, False),  # it was off for long
        ({"idle_seconds": 900 * HOUR, "up_seconds": None}, True),
        ({"idle_seconds": None, "up_seconds": 30 * HOUR}, False),  # a tree
        ({"idle_seconds": 900 * HOUR, "is_configured": False}, False),  # that is said already
    ],
)
def test_runs_that_do_not_come_are_noticed(facts: dict[str, Any], is_stale: bool) -> None:
    assert ("automation-stale" in codes(**facts)) == is_stale


def test_what_could_not_be_looked_at_is_unknown() -> None:
    (finding,) = automation_findings(AutomationFacts(problem="systemctl does not answer"))
    assert (finding.code, finding.severity) == ("automation-unknown", Severity.UNKNOWN)


def test_the_interval_of_the_timer_is_shorter_than_what_counts_as_stale() -> None:
    timer = (Path(__file__).parents[1] / "systemd/gpuguard-rebuild.timer").read_text()
    assert "OnCalendar=00/6:23" in timer, "or core.automation must change, too"
    assert STALE_SECONDS > 2 * 6 * HOUR
