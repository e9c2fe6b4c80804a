"""Prometheus, Alertmanager and node_exporter for real, on loopback, with the real daemon.

A host loses its patch; the alert goes pending, fires, reaches the pager once, and is resolved.
Every query of every dashboard is asked where every metric is there. 49 hosts in one Prometheus.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.box import K1, K2, Box, load
from tests.building import folder_for_others
from tests.daemon_kit import configure, free_port, green_host, lose_patch, serving
from tests.monitoring import DASHBOARDS, filled, panels, queries, tool
from tests.monitoring_hosts import EveryMetric, Vllm
from tests.monitoring_kit import (
    Prometheus,
    alertmanager,
    exposition,
    node_exporter,
    prometheus,
    webhook,
)
from tests.p2pbox import program_environment

pytestmark = pytest.mark.slow

CAUSE = "GpuguardModuleNotPatched"


@pytest.fixture
def host() -> Iterator[Box]:
    with folder_for_others() as folder:
        box = green_host(folder / "host")
        configure(box.root, interval=1)
        yield box


def mend(host: Box) -> None:
    """Rebuild, and load what was built."""
    host.rebuilt()
    load(host.root, host.root / f"lib/modules/{K1}/updates/gpuguard/nvidia.ko")


# --- one host, from the lost patch to the pager and back -------------------------------------


def test_a_lost_patch_pages_once_and_is_resolved(host: Box, tmp_path: Path) -> None:
    with ExitStack() as stack:
        hook = stack.enter_context(webhook())
        manager = stack.enter_context(alertmanager(tmp_path, hook.url))
        served = stack.enter_context(serving(host.root))
        target = f"127.0.0.1:{served.port}"
        seen = stack.enter_context(prometheus(tmp_path, {"gpuguard": [target]}, manager))

        seen.await_query("instance:gpuguard_verdict:code", lambda v: [f["value"] for f in v] == [0])
        assert seen.alerts("firing") == set()

        # what is loaded first: an observation may see the host in the middle of this
        load(host.root, host.dkms_copy(K1))
        lose_patch(host.root)
        pending = f'ALERTS{{alertstate="pending", alertname="{CAUSE}"}}'
        seen.await_query(f"last_over_time({pending}[1m])")
        first = hook.wait(lambda message: message.status == "firing")
        assert first.receiver == "pager"
        assert first.names == {CAUSE}
        (alert,) = first.alerts
        assert alert["labels"]["instance"] == target
        assert alert["labels"]["kernel"] == K1
        assert alert["annotations"]["summary"] == f"Stock modules are loaded on {target}"
        # as the example says, and the label itself is taken off again
        assert alert["annotations"]["runbook_url"] == (
            "https://wiki.example.org/gpuguard/alerts.md#gpuguardmodulenotpatched"
        )
        assert "gpuguard_runbooks" not in alert["labels"]
        # the consequence fires, too, and nobody is told
        seen.await_query('ALERTS{alertstate="firing", alertname="GpuguardP2PLost"}')
        assert seen.value('max(gpuguard_p2p_pairs{capability="read"})') == 0
        assert seen.value("gpuguard:p2p_pairs_missing:sum") == 2
        assert seen.by("verdict", "gpuguard:hosts:count")["critical"] == 1

        mend(host)
        hook.wait(lambda message: message.status == "resolved")
        pages = [(m.status, m.firing) for m in hook.messages if m.receiver == "pager"]
        assert (pages[0], pages[-1]) == (("firing", {CAUSE}), ("resolved", set()))
        # Modules and pairs are not looked at in one instant: the cause may be gone a second before
        # its consequence, which then is a message where messages go out every two seconds.
        assert pages[1:-1] in ([], [("firing", {"GpuguardP2PLost"})])
        seen.await_query("instance:gpuguard_verdict:code", lambda v: [f["value"] for f in v] == [0])
        seen.await_query('ALERTS{alertstate="firing"}', lambda found: not found)


def test_a_kernel_that_is_not_ready_and_a_pending_reboot(host: Box, tmp_path: Path) -> None:
    """Before anything is lost: the critical alert pages, the warning of the same name does not."""
    name = "GpuguardNextKernelNotReady"
    with ExitStack() as stack:
        hook = stack.enter_context(webhook())
        manager = stack.enter_context(alertmanager(tmp_path, hook.url))
        served = stack.enter_context(serving(host.root))
        target = f"127.0.0.1:{served.port}"
        seen = stack.enter_context(prometheus(tmp_path, {"gpuguard": [target]}, manager))
        seen.await_query("instance:gpuguard_verdict:code", lambda v: [f["value"] for f in v] == [0])
        lose_patch(host.root, K2)
        message = hook.wait(lambda message: message.status == "firing")
        assert (message.receiver, message.names) == ("pager", {name})
        assert K2 in message.alerts[0]["annotations"]["description"]
        seen.await_query(f'ALERTS{{alertname="{name}", alertstate="firing", severity="warning"}}')
        host.rebuilt()
        hook.wait(lambda message: message.receiver == "pager" and message.status == "resolved")
        assert [m.firing for m in hook.messages if m.firing] == [{name}]


def test_a_daemon_that_is_gone(host: Box, tmp_path: Path) -> None:
    with ExitStack() as stack:
        served = stack.enter_context(serving(host.root))
        other = stack.enter_context(exposition(EveryMetric().text))
        target = f"127.0.0.1:{served.port}"
        seen = stack.enter_context(prometheus(tmp_path, {"gpuguard": [target, other]}))
        seen.await_query(f'instance:gpuguard_verdict:code{{instance="{target}"}} == 0')
        os.kill(served.process.pid, signal.SIGKILL)
        seen.await_query(
            'ALERTS{alertname="GpuguardDown", alertstate="firing"}',
            lambda found: [f["metric"]["instance"] for f in found] == [target],
        )
        seen.await_query('gpuguard:hosts:count{verdict="unreachable"} == 1')
        assert seen.by("verdict", "gpuguard:hosts:count")["ok"] == 1


def write_textfile(host: Box, folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "gpuguard", "--root", str(host.root), "metrics",
         "--textfile", str(folder / "gpuguard.prom")],
        env=program_environment(), check=True, capture_output=True,
    )  # fmt: skip


def test_a_host_by_textfile(host: Box, tmp_path: Path) -> None:
    """node_exporter reads what gpuguard wrote; the same alert, with node_exporter's address."""
    (textfiles := tmp_path / "textfiles").mkdir()
    write_textfile(host, textfiles)
    with ExitStack() as stack:
        node = stack.enter_context(node_exporter(textfiles))
        seen = stack.enter_context(prometheus(tmp_path, {"node": [node]}))
        seen.await_query("instance:gpuguard_verdict:code", lambda v: [f["value"] for f in v] == [0])
        assert seen.value("node_textfile_scrape_error") == 0
        assert seen.value("instance:gpuguard_interval:seconds") == 300
        lose_patch(host.root)
        write_textfile(host, textfiles)
        seen.await_query(
            f'ALERTS{{alertname="{CAUSE}", alertstate="firing"}}',
            lambda found: [f["metric"]["instance"] for f in found] == [node],
        )
        # the file vanishes, node_exporter stays: nobody watches this host any more
        (textfiles / "gpuguard.prom").unlink()
        seen.await_query(
            'ALERTS{alertname="GpuguardDown", alertstate="firing"}',
            lambda found: [f["metric"]["instance"] for f in found] == [node],
        )


@pytest.mark.parametrize("how", ["daemon", "textfile"])
def test_promtool_finds_nothing_to_mend_in_the_metrics(how: str, host: Box, tmp_path: Path) -> None:
    if how == "textfile":
        write_textfile(host, tmp_path)
        text = (tmp_path / "gpuguard.prom").read_text()
    else:
        with serving(host.root) as served:
            served.await_status("ok")
            text = served.get("/metrics")[1].decode()
    (tmp_path / "metrics").write_text(text)
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"],
        input=text,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- vLLM ----------------------------------------------------------------------------------


def test_a_queue_and_a_dead_engine(tmp_path: Path) -> None:
    vllm = Vllm({"vllm:num_requests_running": 3, "vllm:kv_cache_usage_perc": 0.42})
    with ExitStack() as stack:
        hook = stack.enter_context(webhook())
        manager = stack.enter_context(alertmanager(tmp_path, hook.url))
        gpuguard = stack.enter_context(exposition(EveryMetric().text))
        engine = stack.enter_context(ExitStack())
        target = engine.enter_context(exposition(vllm.text))
        jobs = {"gpuguard": [gpuguard], "vllm": [target]}
        seen = stack.enter_context(prometheus(tmp_path, jobs, manager))
        seen.await_query(f'up{{instance="{target}"}} == 1')

        vllm.numbers["vllm:num_requests_waiting"] = 87
        message = hook.wait(lambda message: "VllmQueueNeedsSlots" in message.firing)
        assert message.receiver == "chat"
        assert (
            "87 request(s) wait for qwen with 3 running and 42% of the KV cache"
            in (message.alerts[0]["annotations"]["description"])
        )
        vllm.numbers["vllm:kv_cache_usage_perc"] = 0.97
        hook.wait(lambda message: "VllmQueueNeedsMemory" in message.firing)

        engine.close()  # as after kill -9: nothing listens any more
        message = hook.wait(lambda message: "VllmEngineDead" in message.firing)
        assert message.receiver == "pager"
        assert message.names == {"VllmEngineDead"}


# --- dashboards ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with one host that has every metric, its cards in dcgm-exporter, and vLLM."""
    host = EveryMetric(changed={"gpuguard_module_shadowed": 1})
    with ExitStack() as stack:
        jobs = {
            "gpuguard": [stack.enter_context(exposition(host.text))],
            "dcgm": [stack.enter_context(exposition(host.dcgm))],
            "vllm": [stack.enter_context(exposition(Vllm().text))],
        }
        folder = tmp_path_factory.mktemp("everything")
        seen = stack.enter_context(prometheus(folder, jobs))
        seen.await_query("gpuguard:gpu_power:watts")
        seen.await_query("instance:gpuguard_verdict:code == 0")
        seen.await_query('gpuguard:hosts:count{verdict="ok"} == 1')
        seen.await_query("rate(vllm:generation_tokens_total[1m]) > 0")
        seen.await_query("increase(gpuguard_rebuilds_total[1m])")
        seen.await_query("instance:gpuguard_lane_stopped:bool == 0")
        yield seen


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_query_has_an_answer(file: Path, everything: Prometheus) -> None:
    (host,) = everything.query("gpuguard_build_info")
    is_vllm = file.stem == "gpuguard-vllm"
    instance = ".*" if is_vllm else host["metric"]["instance"]
    empty = [
        f"{panel['title']}: {expr}"
        for panel, expr in queries(file)
        if not everything.query(filled(expr, instance=instance))
    ]
    assert empty == []


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_columns_are_labels_of_the_answers(file: Path, everything: Prometheus) -> None:
    """What a table renames and hides must be there; a wrong name would be ignored silently."""
    (host,) = everything.query("gpuguard_build_info")
    instance = ".*" if file.stem == "gpuguard-vllm" else host["metric"]["instance"]
    tables = [panel for panel in panels(file) if panel["type"] == "table"]
    for panel in tables:
        answers = [
            everything.query(filled(target["expr"], instance=instance))
            for target in panel["targets"]
        ]
        labels = {label for answer in answers for found in answer for label in found["metric"]}
        values = {"Value"} if len(answers) == 1 else {f"Value #{chr(65 + i)}" for i in range(99)}
        for step in panel["transformations"]:
            options: dict[str, Any] = step["options"]
            if step["id"] == "organize":
                known = labels | values | {"Time"}
                assert set(options["renameByName"]) <= known, panel["title"]
                assert set(options["excludeByName"]) <= known, panel["title"]
                shown = set(options["renameByName"]) | set(options["excludeByName"])
                assert labels <= shown, f"{panel['title']}: {labels - shown} would be shown"
            if step["id"] == "groupingToMatrix":
                assert {options["rowField"], options["columnField"]} <= labels


def test_the_matrix_names_cards(everything: Prometheus) -> None:
    file = next(file for file in DASHBOARDS if file.stem == "gpuguard-host")
    (expr,) = (e for panel, e in queries(file) if panel["title"] == "P2P read")
    (host,) = everything.query("gpuguard_build_info")
    found = everything.query(filled(expr, instance=host["metric"]["instance"]))
    assert {(f["metric"]["from"], f["metric"]["to"]) for f in found} == {
        ("GPU0", "GPU1"),
        ("GPU1", "GPU0"),
    }


def test_the_real_daemon_answers_the_dashboards(host: Box, tmp_path: Path) -> None:
    """What a real host must have; the rest depends on deep probes, holds, a gate, history."""
    may_be_empty = {
        "Bandwidth", "Last deep check", "Gate after boot", "Oldest hold", "Withheld upgrades",
        "Shadowed modules",
        "Packages that policy holds", "Last automatic run", "Its exit status",
        "Temperature", "Utilisation", "Power", "Memory",
        "Oldest hold of each host", "Withheld upgrades of each host", "Cards", "Causes", "Hosts",
    }  # fmt: skip
    with ExitStack() as stack:
        served = stack.enter_context(serving(host.root))
        target = f"127.0.0.1:{served.port}"
        seen = stack.enter_context(prometheus(tmp_path, {"gpuguard": [target]}))
        seen.await_query("gpuguard:hosts:count")
        seen.await_query("increase(gpuguard_rebuilds_total[1m])")
        for file in DASHBOARDS:
            if file.stem == "gpuguard-vllm":
                continue
            empty = {
                panel["title"]
                for panel, expr in queries(file)
                if not seen.query(filled(expr, instance=target))
            }
            assert empty <= may_be_empty


# --- many hosts ----------------------------------------------------------------------------


def test_49_hosts_in_one_prometheus(tmp_path: Path) -> None:
    """40 ok, 4 warning, 3 lost P2P, 1 that says unknown, 1 that is not there."""
    hosts = [EveryMetric(number=number) for number in range(1, 49)]
    for host in hosts[40:44]:
        host.verdict = "warning"
    for host in hosts[44:47]:
        host.verdict = "critical"
        host.changed = {"gpuguard_p2p_pair_ok": 0, "gpuguard_p2p_pairs": 0}
    hosts[47].verdict = "unknown"
    with ExitStack() as stack:
        targets = [stack.enter_context(exposition(host.text)) for host in hosts]
        absent = f"127.0.0.1:{free_port()}"
        jobs = {
            "gpuguard": [*targets, absent],
            "dcgm": [stack.enter_context(exposition(host.dcgm)) for host in hosts[:2]],
        }
        seen = stack.enter_context(prometheus(tmp_path, jobs))
        seen.await_query("count(gpuguard_build_info) == 48")
        seen.await_query('gpuguard:hosts:count{verdict="unreachable"} == 1')
        seen.await_query("sum(gpuguard:hosts:count) == 49")
        assert seen.by("verdict", "gpuguard:hosts:count") == {
            "ok": 40, "warning": 4, "critical": 3, "unknown": 1, "unreachable": 1,
        }  # fmt: skip
        # labels are unique: nothing was dropped for being there twice
        assert seen.value("count(gpuguard_p2p_pair_ok)") == 48 * 2 * 2
        assert seen.value("count(count by (instance, src_uuid) (gpuguard_p2p_pair_ok))") == 48 * 2
        assert seen.value("count(scrape_samples_scraped != scrape_samples_post_metric_relabeling)"
                          " or vector(0)") == 0  # fmt: skip
        lost = set(targets[44:47])
        seen.await_query(
            'ALERTS{alertname="GpuguardP2PLost", alertstate="firing"}',
            lambda found: {f["metric"]["instance"] for f in found} == lost,
        )
        assert seen.value("gpuguard:p2p_pairs_missing:sum") == 3 * 2
        assert set(seen.by("instance", "gpuguard:gpu_temperature:celsius")) == set(targets[:2])
        broken = [
            (rule["name"], rule["lastError"])
            for group in seen.ask("rules")["groups"]
            for rule in group["rules"]
            if rule.get("lastError")
        ]
        assert broken == []
        fleet = next(file for file in DASHBOARDS if file.stem == "gpuguard-fleet")
        (table,) = (panel for panel in panels(fleet) if panel["title"] == "Hosts")
        assert len(seen.query(table["targets"][0]["expr"])) == 49
        assert all(len(seen.query(target["expr"])) == 48 for target in table["targets"][1:])
