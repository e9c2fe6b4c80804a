"""The daemon while what it was made from changes: configuration, certificates, gpuguard itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuguard.errors import ConfigError
from tests.daemon_kit import cards_only, configure, free_port, parse, run_serve, serving, value
from tests.p2pbox import REPOSITORY, P2pBox, program_environment
from tests.test_daemon_clients import _DEAR, _RIGHT, guarded
from tests.test_daemon_faults import _get_tls, certificate, web_config

pytestmark = pytest.mark.slow


@pytest.fixture
def box(tmp_path: Path) -> P2pBox:
    made = cards_only(tmp_path / "host", 2)
    made.configure()
    configure(made.root)
    return made


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A gpuguard that can be upgraded under its daemon."""
    shutil.copytree(REPOSITORY / "gpuguard", tmp_path / "copy/gpuguard")
    return tmp_path / "copy"


def test_many_reloads_are_one_and_once_more(box: P2pBox) -> None:
    guarded(box, "{}")
    web = box.root / "etc/gpuguard/web.yaml"
    with serving(box.root) as served:
        web.unlink()
        os.mkfifo(web, 0o600)  # whoever reads the configuration waits
        for _ in range(6):
            served.process.send_signal(signal.SIGHUP)
            assert served.get("/-/healthy")[0] == 200  # so the signal was noticed
        with web.open("w") as file:
            web.unlink()
            web.write_text("")
            file.write("{}")
        for _ in range(2):
            served.await_told(lambda message: "READY=1" in message)
        assert served.stop() == 0
        served.await_told(lambda message: "STOPPING=1" in message)
        assert sum("RELOADING=1" in message for message in served.told) == 2


def test_another_client_authority_is_used_after_a_reload(box: P2pBox) -> None:
    folder = web_config(
        box,
        "tls_server_config:\n  cert_file: web.crt\n  key_file: web.key\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.crt\n",
    )
    for name in ("web", "old", "new"):
        certificate(folder, name)
    shutil.copy(folder / "old.crt", folder / "ca.crt")
    old, new = ((folder / f"{name}.crt", folder / f"{name}.key") for name in ("old", "new"))
    with serving(box.root) as served:
        assert _get_tls(served, folder / "web.crt", old) == 200
        shutil.copy(folder / "new.crt", folder / "ca.crt")
        served.process.send_signal(signal.SIGHUP)
        served.await_told(lambda message: "READY=1" in message)
        assert _get_tls(served, folder / "web.crt", new) == 200
        with pytest.raises(OSError, match=r"(?i)alert|reset|eof|closed"):
            _get_tls(served, folder / "web.crt", old)


def test_listening_openly_is_said_after_a_reload_too(box: P2pBox) -> None:
    guarded(box, f"{{scraper: {_RIGHT}}}")
    # Loopback by a name that does not show it.
    with serving(box.root, "--listen", f"2130706433:{free_port()}") as served:
        assert not any("for everybody" in line for line in served.log())
        guarded(box, "{}")
        served.process.send_signal(signal.SIGHUP)
        served.await_told(lambda message: "READY=1" in message)
        assert sum("for everybody" in line for line in served.log()) == 1


def test_a_hash_that_costs_too_much_is_refused(box: P2pBox) -> None:
    guarded(box, f"{{scraper: {_DEAR.replace('$14$', '$15$')}}}")
    done = run_serve(box.root, "--listen", f"127.0.0.1:{free_port()}")
    assert done.returncode == ConfigError.exit_status
    assert "scraper: the hash has cost 15" in done.stderr


def test_the_daemon_gives_way_to_another_version(box: P2pBox, copy: Path) -> None:
    with serving(box.root, program=copy) as served:
        init = copy / "gpuguard/__init__.py"
        init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9.'))
        served.process.send_signal(signal.SIGHUP)
        assert served.process.wait(60) == 75  # the unit has Restart=on-failure
        assert any("is installed by now, this is" in line for line in served.log())
    unit = (REPOSITORY / "systemd/gpuguard.service").read_text()
    assert "\nRestart=on-failure\n" in unit


def test_a_page_that_cannot_be_drawn_keeps_no_metrics_back(box: P2pBox, copy: Path) -> None:
    child = copy / "gpuguard/daemon/child.py"
    text = child.read_text()
    child.write_text(
        text.replace("    json.dump(", '    answer.get("status", {}).pop("p2p", 0)\n    json.dump(')
    )
    with serving(box.root, program=copy) as served:
        series = served.await_series(
            lambda found: bool(value(found, "gpuguard_observation_timestamp_seconds"))
        )
        assert value(series, "gpuguard_probe_success", probe="rebuild") == 1
        assert served.get("/")[0] == 500
        assert sum("cannot be drawn" in line for line in served.log()) == 1
        assert all(line.startswith("gpuguard: ") for line in served.log())


def test_a_textfile_of_a_broken_configuration_does_not_say_it_was_read(box: P2pBox) -> None:
    (box.root / "etc/gpuguard/gpuguard.d/90-test.yaml").write_text("serve: {nothing: 1}\n")
    done = subprocess.run(
        [sys.executable, "-m", "gpuguard", "--root", box.root, "metrics"],
        env=program_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    series = parse(done.stdout)
    assert value(series, "gpuguard_config_last_reload_successful") == 0
    assert value(series, "gpuguard_config_last_reload_success_timestamp_seconds") == 0
