"""``gpuguard serve`` on a tree: what it serves, when it looks, what it tells and logs."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.box import K1, K2, Box
from tests.building import folder_for_others
from tests.daemon_kit import (
    Served,
    configure,
    green_host,
    lose_patch,
    named,
    run_serve,
    serving,
    value,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with folder_for_others() as folder:
        green_host(folder / "host")
        yield folder / "host"


@pytest.fixture
def host(base: Path, tmp_path: Path) -> Box:
    """A green host of the test's own."""
    shutil.copytree(base, tmp_path / "host", symlinks=True)
    configure(tmp_path / "host")
    return Box(tmp_path / "host")


def observed(served: Served, verdict: str = "ok") -> Served:
    served.await_status(verdict)
    return served


def test_a_green_host(host: Box) -> None:
    with serving(host.root) as served:
        series = observed(served).series()
        assert value(series, "gpuguard_verdict", verdict="ok") == 1
        assert sum(named(series, "gpuguard_verdict").values()) == 1
        assert value(series, "gpuguard_kernel_ready", kernel=K1, role="running") == 1
        assert value(series, "gpuguard_kernel_ready", kernel=K2, role="next") == 1
        pairs = named(series, "gpuguard_p2p_pair_ok")
        assert list(pairs.values()) == [1] * 4
        assert value(series, "gpuguard_p2p_pairs", capability="read") == 2
        assert value(series, "gpuguard_p2p_pairs_expected", capability="write") == 2
        for where, kernel in (("loaded", K1), ("disk", K1), ("disk", K2)):
            labels = {"module": "nvidia", "kernel": kernel, "where": where}
            assert value(series, "gpuguard_module_patched", **labels) == 1
        assert value(series, "gpuguard_reboot_required", reason="kernel") == 1
        assert value(series, "gpuguard_reboot_required", reason="userland") == 0
        assert value(series, "gpuguard_reboot_safe") == 1
        assert value(series, "gpuguard_rebuilds_total", result="done") == 2
        assert value(series, "gpuguard_rebuilds_total", result="failed") == 0
        assert value(series, "gpuguard_observation_interval_seconds") == 3600
        assert set(named(series, "gpuguard_probe_success").values()) == {1}


def test_uuids_are_as_nvml_prints_them(host: Box) -> None:
    with serving(host.root) as served:
        series = observed(served).series()
        uuids = {dict(labels)["uuid"] for labels in named(series, "gpuguard_gpu_info")}
        ends = {
            dict(labels)[end]
            for labels in named(series, "gpuguard_p2p_pair_ok")
            for end in ("src_uuid", "dst_uuid")
        }
        assert uuids == ends
        assert all(uuid.startswith("GPU-") for uuid in uuids)


def test_a_change_of_files_is_noticed_before_the_interval(host: Box) -> None:
    with serving(host.root) as served:
        observed(served)
        lose_patch(host.root)
        observed(served, "critical")
        series = served.series()
        assert set(named(series, "gpuguard_p2p_pair_ok").values()) == {0}
        assert len(named(series, "gpuguard_p2p_pair_ok")) == 4  # bad ones are there, too
        assert value(series, "gpuguard_p2p_pairs", capability="read") == 0
        assert value(series, "gpuguard_p2p_pairs_expected", capability="read") == 2
        loaded = {"module": "nvidia", "kernel": K1, "where": "loaded"}
        assert value(series, "gpuguard_module_patched", **loaded) == 0
        served.stop()
        log = served.log()
        assert "gpuguard: verdict from ok to critical" in log
        assert any("[p2p-lost]" in line for line in log)
        assert len(log) == len(set(log))  # one line per change


def test_a_queued_rebuild_is_logged_once(host: Box) -> None:
    queue = host.root / "var/lib/gpuguard/rebuild-wanted"
    with serving(host.root) as served:
        observed(served)
        queue.touch()
        served.await_series(lambda found: value(found, "gpuguard_rebuild_queued") == 1)
        queue.unlink()
        served.await_series(lambda found: value(found, "gpuguard_rebuild_queued") == 0)
        lines = [line for line in served.log() if "queued" in line]
        assert lines == ["gpuguard: an automatic rebuild is queued"]


def test_nothing_is_logged_while_nothing_changes(host: Box) -> None:
    configure(host.root, interval=1)
    with serving(host.root) as served:
        observed(served)
        first = served.log()
        for _ in range(2):
            observed(served)
        assert served.log() == first == ["gpuguard: verdict is ok"]


def test_driver_unloaded_and_loaded_again(host: Box) -> None:
    configure(host.root, interval=1)
    version = host.root / "proc/driver/nvidia/version"
    text = version.read_text()
    module = host.root / "sys/module/nvidia"
    with serving(host.root) as served:
        observed(served)
        version.unlink()
        module.rename(host.root / "sys/nvidia")
        series = served.await_series(
            lambda found: value(found, "gpuguard_probe_success", probe="topo") == 0
        )
        assert named(series, "gpuguard_p2p_pair_ok") == {}
        assert value(series, "gpuguard_p2p_unavailable", reason="no-driver") == 1
        assert value(series, "gpuguard_kernel_ready", kernel=K2, role="next") == 1
        last = value(series, "gpuguard_probe_last_success_timestamp_seconds", probe="topo")
        (host.root / "sys/nvidia").rename(module)
        version.write_text(text)
        series = served.await_series(
            lambda found: value(found, "gpuguard_probe_success", probe="topo") == 1
        )
        assert value(series, "gpuguard_p2p_pairs", capability="read") == 2
        again = value(series, "gpuguard_probe_last_success_timestamp_seconds", probe="topo")
        assert last is not None
        assert again is not None
        assert again > last > 0


def test_pages_and_nothing_else(host: Box) -> None:
    with serving(host.root) as served:
        observed(served)
        assert served.get("/-/healthy")[:2] == (200, b"healthy\n")
        assert served.get("/-/ready")[:2] == (200, b"ready\n")
        assert served.get("/metrics?name[]=x")[0] == 200
        for path in ("/etc/passwd", "/../../etc/passwd", "/metrics/", "//metrics", "/%2e%2e/"):
            assert served.get(path)[0] == 404, path
        assert served.get("/metrics", method="POST")[0] == 405
        status, body, headers = served.get("/metrics", method="HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["content-length"]) > 1000


def test_openmetrics_for_those_who_ask(host: Box) -> None:
    with serving(host.root) as served:
        observed(served)
        plain = served.get("/metrics")
        accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        other = served.get("/metrics", {"Accept": accept})
        assert plain[2]["content-type"].startswith("text/plain; version=0.0.4")
        assert other[2]["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert other[1].endswith(b"# EOF\n")
        assert b"# EOF" not in plain[1]


def test_promtool_finds_nothing_wrong(host: Box) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing; apt-get install prometheus")
    with serving(host.root) as served:
        body = observed(served).get("/metrics")[1]
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=body, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_page_for_a_person(host: Box) -> None:
    with serving(host.root) as served:
        _, body, headers = observed(served).get("/")
        page = body.decode()
        assert "rig-07" in page
        assert "Everything is as it should be." in page
        assert K2 in page
        assert page.count('<td class="ok">OK</td>') == 2
        assert "<script" not in page
        assert "http" not in page.replace("http-equiv", "")  # nothing is loaded from anywhere
        assert "default-src 'none'" in headers["content-security-policy"]


def test_what_the_host_says_cannot_become_markup(host: Box) -> None:
    (host.root / "etc/hostname").write_text("<script>alert(1)</script>&\n")
    with serving(host.root) as served:
        page = observed(served).get("/")[1].decode()
        assert "<script" not in page
        assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in page


def test_ready_only_after_the_first_look(host: Box) -> None:
    fifo = host.root / "proc/driver/nvidia/version"
    fifo.unlink()
    subprocess.run(["mkfifo", fifo], check=True)  # whoever reads it waits
    with serving(host.root) as served:
        assert served.get("/-/ready")[0] == 503
        assert served.get("/-/healthy")[0] == 200
        series = served.series()
        assert value(series, "gpuguard_build_info", version=_version()) == 1
        assert value(series, "gpuguard_probe_success", probe="topo") == 0
        assert named(series, "gpuguard_kernel_ready") == {}


def _version() -> str:
    from gpuguard import __version__

    return __version__


def test_signals_of_the_service_manager(host: Box) -> None:
    with serving(host.root, WATCHDOG_USEC="3000000") as served:
        observed(served)
        served.await_told(lambda message: "WATCHDOG=1" in message)
        assert served.stop() == 0
        told = [*served.told, served.manager.recv(65536).decode()]
        assert any("STOPPING=1" in message for message in told)


def test_reload(host: Box) -> None:
    with serving(host.root) as served:
        observed(served)
        configure(host.root, interval=1800)
        served.process.send_signal(signal.SIGHUP)
        served.await_told(lambda message: message.startswith("RELOADING=1\nMONOTONIC_USEC="))
        served.await_told(lambda message: "READY=1" in message)
        series = served.series()
        assert value(series, "gpuguard_observation_interval_seconds") == 1800
        assert value(series, "gpuguard_config_last_reload_successful") == 1
        assert "gpuguard: configuration read again" in served.log()


def test_a_broken_configuration_is_refused_and_the_old_one_kept(host: Box) -> None:
    configure(host.root, p2p={"expected_gpus": 3})
    with serving(host.root) as served:
        observed(served, "critical")
        assert value(served.series(), "gpuguard_gpus_expected") == 3
        (host.root / "etc/gpuguard/gpuguard.d/90-test.yaml").write_text("serve: {interval: 1}\n")
        served.process.send_signal(signal.SIGHUP)
        served.await_told(lambda message: "READY=1" in message)
        refused = [line for line in served.log() if "configuration refused" in line]
        assert len(refused) == 1
        assert "serve.interval" in refused[0]
        observed(served, "critical")  # a look after it
        series = served.series()
        assert value(series, "gpuguard_config_last_reload_successful") == 0
        assert value(series, "gpuguard_observation_interval_seconds") == 3600
        assert value(series, "gpuguard_gpus_expected") == 3


def test_what_a_reload_cannot_change_is_refused(host: Box) -> None:
    with serving(host.root) as served:
        observed(served)
        configure(host.root, interval=5, serve={"listen": "127.0.0.1:1"})
        served.process.send_signal(signal.SIGHUP)
        served.await_told(lambda message: "READY=1" in message)
        (line,) = [line for line in served.log() if "configuration refused" in line]
        assert "serve.listen is changed by a restart only" in line
        assert value(served.series(), "gpuguard_observation_interval_seconds") == 3600


def test_a_broken_configuration_at_the_start(host: Box) -> None:
    configure(host.root, serve={"listen": "nowhere"})
    done = run_serve(host.root)
    assert done.returncode == 78
    assert "[config-invalid]" in done.stderr
    assert "serve.listen" in done.stderr


def test_port_in_use(host: Box) -> None:
    with serving(host.root) as served:
        done = run_serve(host.root, "--listen", f"127.0.0.1:{served.port}")
        assert done.returncode == 69
        assert f"cannot listen on 127.0.0.1:{served.port}: " in done.stderr
        assert "in use" in done.stderr
        assert "[cannot-listen]" in done.stderr
