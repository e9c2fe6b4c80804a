"""Daemon and gate as units of a booted Debian: hardening, notify, watchdog, reload, journal.

The tests are stages of one story and run in this order, on one machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests import booted, booted_roots
from tests.booted import Machine
from tests.booted_roots import RELEASES
from tests.daemon_kit import Series, named, parse, value

pytestmark = pytest.mark.slow

DAEMON, GATE = "gpuguard.service", "gpuguard-verify.service"
_FETCH = (
    "import sys, urllib.request as u; sys.stdout.write(u.build_opener(u.ProxyHandler({})).open("
    "'http://127.0.0.1:9838' + sys.argv[1], timeout=10).read().decode())"
)


@pytest.fixture(scope="module", params=RELEASES, ids=lambda debian: debian.suite)
def system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    reason = booted_roots.missing()
    if reason:
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp(f"daemon-{request.param.suite}")
    with booted.prepared(request.param, folder) as machine:
        done = machine.gpuguard("setup")
        assert done.returncode == 0, done.stdout + done.stderr
        done = machine.gpuguard("rebuild")
        assert done.returncode == 0, done.stdout + done.stderr
        machine.reboot()
        yield machine


def fetch(system: Machine, path: str) -> str:
    return system.run("python3", "-c", _FETCH, path).stdout


def series_of(system: Machine) -> Series:
    return parse(fetch(system, "/metrics"))


def entries(system: Machine, unit: str, event: str) -> list[dict[str, Any]]:
    """Journal entries of one event, by their own fields."""
    done = system.run(
        "journalctl", "-b", "-q", "-o", "json", f"_SYSTEMD_UNIT={unit}", f"GPUGUARD_EVENT={event}"
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def status_text(system: Machine) -> str:
    return system.show(DAEMON, "StatusText")


def await_status(system: Machine, *verdicts: str) -> None:
    system.wait_for(
        lambda: status_text(system).split(";")[0] in verdicts, 60, f"the daemon says {verdicts}"
    )


def test_it_serves_under_an_account_of_its_own(system: Machine) -> None:
    await_status(system, "ok")
    assert system.show(DAEMON, "ActiveState") == "active"
    pid = system.show(DAEMON, "MainPID")
    status = system.run("cat", f"/proc/{pid}/status").stdout
    account = status.partition("Uid:\t")[2].split()[0]
    assert int(account) > 60000  # DynamicUser
    series = series_of(system)
    assert set(named(series, "gpuguard_probe_success").values()) == {1}
    assert value(series, "gpuguard_verdict", verdict="ok") == 1
    old = system.base.old
    assert value(series, "gpuguard_kernel_ready", kernel=old, role="running") == 1
    assert value(series, "gpuguard_kernel_ready", kernel=old, role="next") == 1
    loaded = {"module": "nvidia", "kernel": old, "where": "loaded"}
    assert value(series, "gpuguard_module_patched", **loaded) == 1
    assert value(series, "gpuguard_p2p_pairs", capability="read") == 12
    assert value(series, "gpuguard_rebuilds_total", result="done") == 1


def test_it_sees_what_root_sees(system: Machine) -> None:
    told = {(f["code"], f["subject"]) for f in system.status()["findings"]}
    page = fetch(system, "/")
    assert all(code in page for code, _ in told)
    assert "Everything is as it should be." in page


def test_the_gate_is_one_line_and_a_metric(system: Machine) -> None:
    system.systemctl("start", GATE)
    assert (
        "gpuguard: gate open: 4 cards, all 12 ordered pairs granted"
        in system.run("systemctl", "status", "--no-pager", GATE).stdout
    )
    system.wait_for(
        lambda: named(series_of(system), "gpuguard_gate_verdict"), 60, "the gate's metric"
    )
    verdicts = named(series_of(system), "gpuguard_gate_verdict")
    assert [dict(labels)["verdict"] for labels, is_set in verdicts.items() if is_set] in (
        ["ok"], ["warning"],
    )  # fmt: skip


def test_events_have_fields(system: Machine) -> None:
    (entry,) = entries(system, DAEMON, "verdict-changed")
    assert entry["MESSAGE"] == "verdict is ok"
    assert entry["GPUGUARD_VERDICT"] == "ok"
    assert (entry["PRIORITY"], entry["SYSLOG_IDENTIFIER"]) == ("5", "gpuguard")


def test_reload(system: Machine) -> None:
    dropin = system.live_path("/etc/gpuguard/gpuguard.d/90-test.yaml")
    dropin.parent.mkdir(exist_ok=True)
    dropin.write_text("p2p: {expected_gpus: 5}\n")
    system.systemctl("reload", DAEMON)
    await_status(system, "critical")
    assert value(series_of(system), "gpuguard_gpus_expected") == 5
    dropin.write_text("p2p: {expected_gpu: 4}\n")
    system.systemctl("reload", DAEMON)
    system.wait_for(lambda: entries(system, DAEMON, "config-refused"), 60, "its event")
    (refused,) = entries(system, DAEMON, "config-refused")
    system.wait_for(lambda: system.show(DAEMON, "ActiveState") == "active", 60, "it goes on")
    assert "p2p.expected_gpu" in refused["MESSAGE"]
    series = series_of(system)
    assert value(series, "gpuguard_config_last_reload_successful") == 0
    assert value(series, "gpuguard_gpus_expected") == 5
    dropin.unlink()
    system.systemctl("reload", DAEMON)
    await_status(system, "ok")


def test_a_rebuild_that_is_wanted_is_seen_at_once(system: Machine) -> None:
    system.systemctl("stop", "gpuguard-rebuild.path", "gpuguard-rebuild.timer")
    queue = system.live_path("/var/lib/gpuguard/rebuild-wanted")
    queue.touch()
    system.wait_for(lambda: entries(system, DAEMON, "rebuild-queued"), 30, "its event")
    assert value(series_of(system), "gpuguard_rebuild_queued") == 1
    queue.unlink()
    system.systemctl("start", "gpuguard-rebuild.path", "gpuguard-rebuild.timer")


def test_a_loop_that_hangs_is_restarted(system: Machine) -> None:
    folder = system.live_path(f"/etc/systemd/system/{DAEMON}.d")
    folder.mkdir(exist_ok=True)
    (folder / "test.conf").write_text("[Service]\nWatchdogSec=2s\nRestartSec=100ms\n")
    system.systemctl("daemon-reload")
    system.systemctl("restart", DAEMON)
    await_status(system, "ok")
    pid = system.show(DAEMON, "MainPID")
    system.run("kill", "-STOP", pid)
    system.wait_for(lambda: system.show(DAEMON, "NRestarts") == "1", 60, "systemd's watchdog")
    await_status(system, "ok")
    assert system.show(DAEMON, "MainPID") != pid


def test_it_ends_when_asked(system: Machine) -> None:
    system.systemctl("stop", DAEMON)
    assert system.show(DAEMON, "Result") == "success"
    assert system.show(DAEMON, "ActiveState") == "inactive"
