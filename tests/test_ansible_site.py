"""site.yml on a bare booted Debian: from nothing to a lane that answers, then nothing to do.

The engine is the stub; apt, dkms, systemd, HAProxy, Prometheus and Alertmanager are real. One
machine lives through the whole story, because making it takes minutes. Whoever logs in has the
umask 077: what services read must not depend on it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import ansible_kit, booted_roots
from tests.ansible_kit import WHEELS
from tests.ansible_site import ALERTMANAGER, FRONT, PROMETHEUS, PROMPT, Site, bare_site
from tests.realroot import REPO

pytestmark = pytest.mark.slow

_GRAFANA = """\
[Unit]
Description=Stand-in for Grafana

[Service]
ExecStart=/bin/sleep infinity
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    for reason in (ansible_kit.missing(), booted_roots.missing()):
        if reason is not None:
            pytest.skip(reason)
    with tempfile.TemporaryDirectory() as name, bare_site(Path(name)) as site:
        ansible_kit.install_stub_engine(site.system.root)
        site.system.path("/etc/grafana/provisioning/dashboards").mkdir(parents=True)
        site.system.path("/etc/systemd/system/grafana-server.service").write_text(_GRAFANA)
        site.boot(ansible_booted_umask="0077")
        yield site


def test_check_mode_passes_on_a_bare_host_and_changes_nothing(site: Site) -> None:
    before = site.changes()
    run = site.play("--check")
    assert run.returncode == 0, run.output
    assert run.count("gpu1", "changed") > 5, "it says what a real run would do"
    assert site.changes() == before
    assert not site.system.path("/opt/gpuguard").exists()


def test_what_is_missing_ends_the_run_before_anything_is_changed(site: Site) -> None:
    version = site.variables.pop("nvidia_driver_version")
    run = site.play("--tags", "nvidia_driver")
    assert run.returncode != 0
    assert "nvidia_driver_version" in run.output
    assert run.count("gpu1", "changed") == 0
    site.variables["nvidia_driver_version"] = version


def test_from_bare_to_a_lane_that_answers(site: Site) -> None:
    # no kernel is there that could load a module: that takes the reboot, in the middle of the run
    with site.changed(nvidia_driver_reboot=True):
        run = site.play()
    assert run.returncode == 0, run.output
    assert site.wall.boots == 1
    status = site.system.status()
    assert status["driver"]["loaded_identity"] == "patched"
    assert status["kernels"][0]["ready"], status
    assert status["holds"]["missing"] == []
    held = site.system.run("apt-mark", "showhold").stdout.split()
    assert {"nvidia-driver", "linux-headers-cloud-amd64", "linux-image-cloud-amd64"} <= set(held)
    answer = site.http(FRONT, "/v1/completions", PROMPT)
    assert answer["choices"][0]["text"], answer


def test_what_proves_p2p_by_bytes_comes_with_it(site: Site) -> None:
    said = site.system.run(
        "/opt/gpuguard/bin/python", "-m", "pip", "list", "--format=freeze"
    ).stdout
    assert {"cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13"} <= {
        line.partition("==")[0].replace("_", "-") for line in said.splitlines()
    }


def test_the_second_run_changes_nothing(site: Site) -> None:
    again = site.play()
    assert again.returncode == 0, again.output
    assert again.count("gpu1", "changed") == 0, again.output
    checked = site.play("--check")
    assert (checked.returncode, checked.count("gpu1", "changed")) == (0, 0), checked.output


def test_other_drivers_are_kept_away_also_in_the_initramfs(site: Site) -> None:
    listed = site.system.run("lsinitramfs", f"/boot/initrd.img-{site.system.base.old}").stdout
    assert "etc/modprobe.d/gpuguard-blacklist.conf" in listed
    lines = site.system.path("/etc/modprobe.d/gpuguard-blacklist.conf").read_text().splitlines()
    modules = ("nouveau", "nova_core", "nova_drm")
    assert {f"blacklist {module}" for module in modules} <= set(lines)
    # as after a run that broke off between the two
    site.system.run("touch", "/etc/modprobe.d/gpuguard-blacklist.conf")
    mended = site.play_part("nvidia_driver", "main")
    assert (mended.returncode, mended.count("gpu1", "changed")) == (0, 1), mended.output
    again = site.play_part("nvidia_driver", "main")
    assert (again.returncode, again.count("gpu1", "changed")) == (0, 0), again.output


def test_what_services_read_does_not_depend_on_a_umask(site: Site) -> None:
    for account, path in (
        ("nobody", "/opt/gpuguard/bin/gpuguard"),
        ("nobody", "/etc/gpuguard/lanes/tiny.yaml"),
        ("prometheus", "/etc/prometheus/prometheus.yml"),
        ("prometheus", "/etc/prometheus/rules.d/gpuguard-alerts.rules.yml"),
        ("nobody", "/etc/grafana/provisioning/dashboards/gpuguard.yaml"),
    ):
        site.system.run("test", "-r", path, user=account)
    assert site.system.path("/etc/prometheus/prometheus.yml").stat().st_mode & 0o007 == 0


def test_what_listens_listens_on_loopback(site: Site) -> None:
    lines = site.system.run("ss", "-Hltn").stdout.splitlines()
    addresses = {line.split()[3] for line in lines}
    wanted = {FRONT, PROMETHEUS, ALERTMANAGER, "127.0.0.1:9100", "127.0.0.1:9838",
              "127.0.0.1:18001"}  # fmt: skip
    assert wanted <= addresses
    assert {a for a in addresses if not a.startswith("127.0.0.1:")} == set()


def test_prometheus_scrapes_all_and_has_the_rules_of_the_package(site: Site) -> None:
    jobs = {"gpuguard", "vllm", "node", "prometheus", "alertmanager"}
    site.system.wait_for(lambda: site.query("up") == dict.fromkeys(jobs, 1.0), 60, "all scraped")
    groups = site.http(PROMETHEUS, "/api/v1/rules")["data"]["groups"]
    loaded = {rule["name"] for group in groups for rule in group["rules"]}
    for file in (REPO / "gpuguard/resources/prometheus").glob("*.rules.yml"):
        for group in yaml.safe_load(file.read_text())["groups"]:
            names = {rule.get("alert", rule.get("record")) for rule in group["rules"]}
            assert names <= loaded


def test_grafana_is_told_where_the_dashboards_are(site: Site) -> None:
    provider = site.system.path("/etc/grafana/provisioning/dashboards/gpuguard.yaml")
    (folder,) = [
        one["options"]["path"] for one in yaml.safe_load(provider.read_text())["providers"]
    ]
    assert list(site.system.path(folder).glob("*.json"))
    assert site.system.show("grafana-server.service", "ActiveState") == "active", "was restarted"


def test_an_alert_fires_when_the_engine_is_killed(site: Site) -> None:
    # the lane came after Prometheus: what that said of the time before has to end first
    site.system.wait_for(lambda: "VllmEngineDead" not in site.firing(), 60, "no alert")
    main = site.system.show("lane-tiny.service", "MainPID")
    engine = site.system.run("ps", "-o", "pid=", "--ppid", main).stdout.split()[0]
    site.system.run("kill", "-9", engine)
    site.system.wait_for(lambda: "VllmEngineDead" in site.firing(), 90, "the alert")
    site.system.wait_for(lambda: site.http(FRONT, "/health") == 503, 30, "an honest 503")


def test_after_a_reboot_the_lane_serves_by_itself(site: Site) -> None:
    site.reboot()
    site.system.wait_for(site.answers, 90, "the lane serves")
    assert site.system.gpuguard("verify").returncode == 0
    assert site.system.show("nvidia-persistenced.service", "ActiveState") == "active"
    again = site.play("--tags", "nvidia_driver")
    assert (again.returncode, again.count("gpu1", "changed")) == (0, 0), again.output


def test_a_reboot_is_due_and_nobody_asked_for_it(site: Site) -> None:
    _load_another_module(site)
    boots = site.wall.boots
    run = site.play("--tags", "nvidia_driver")
    assert (run.returncode, run.count("gpu1", "changed")) == (0, 0), run.output
    assert "a reboot is due: patched modules are installed" in run.output
    assert site.wall.boots == boots


def test_a_reboot_that_somebody_holds_back_costs_no_client_anything(site: Site) -> None:
    boots = site.wall.boots
    with site.changed(nvidia_driver_reboot=True), ansible_kit.held_back(site.system):
        run = site.play("--tags", "nvidia_driver")
    assert (run.returncode != 0, site.wall.boots) == (True, boots), run.output
    assert "was not rebooted, and serves as before" in run.output
    assert site.answers()


def test_a_reboot_that_is_asked_for_is_out_of_service_and_proven(site: Site) -> None:
    front: list[str] = []
    config, boots = site.system.path("/etc/gpuguard/front.cfg"), site.wall.boots
    site.wall.before_boot = lambda: front.append(config.read_text())
    with site.changed(nvidia_driver_reboot=True):
        run = site.play("--tags", "nvidia_driver")
        assert run.returncode == 0, run.output
        assert site.answers()
        assert " disabled" in front[0], "it went down without traffic"
        again = site.play("--tags", "nvidia_driver")
    assert (again.returncode, again.count("gpu1", "changed")) == (0, 0), again.output
    assert site.wall.boots == boots + 1


def test_a_reboot_is_not_called_done_without_the_proof(site: Site) -> None:
    _load_another_module(site)
    bus, boots = site.system.path("/srv/lab/kernel/pci"), site.wall.boots
    site.wall.before_boot = lambda: shutil.move(bus, bus.with_name("no-pci"))
    with site.changed(nvidia_driver_reboot=True):
        run = site.play("--tags", "nvidia_driver")
    site.wall.before_boot = lambda: None
    shutil.move(bus.with_name("no-pci"), bus)
    assert (run.returncode != 0, site.wall.boots) == (True, boots + 1), run.output
    assert "gpuguard-verify.service" in run.output
    site.reboot()
    site.system.wait_for(site.answers, 90, "the lane serves")


def test_an_environment_can_be_used_by_its_engine_and_is_not_changed(site: Site) -> None:
    environment = {"path": "/opt/engine-1", "requirements": [*_OFFLINE, "PyYAML"]}
    with site.changed(vllm_environments=[environment]):
        made = site.play_part("vllm", "venv")
        assert made.returncode == 0, made.output
        site.system.run("/opt/engine-1/bin/python", "-c", "import yaml", user="vllm")
        again = site.play_part("vllm", "venv")
        assert (again.returncode, again.count("gpu1", "changed")) == (0, 0), again.output
        environment["requirements"] = [*_OFFLINE, "typer"]
        other = site.play_part("vllm", "venv")
    assert (other.returncode != 0, other.count("gpu1", "changed")) == (True, 0)
    assert "a path of its own" in other.output


def test_a_model_that_its_engine_cannot_read_is_named(site: Site) -> None:
    weights = site.system.path("/srv/model/model.safetensors")
    weights.chmod(0o600)
    run = site.play("--tags", "vllm")
    weights.chmod(0o644)
    assert (run.returncode != 0, run.count("gpu1", "changed")) == (True, 0)
    assert "runs as vllm and cannot read /srv/model/model.safetensors" in _flat(run.output)


def test_an_environment_that_its_engine_cannot_use_is_named(site: Site) -> None:
    program = site.system.path("/opt/vllm/bin/vllm")
    program.chmod(0o700)
    run = site.play("--tags", "vllm")
    program.chmod(0o755)
    assert (run.returncode != 0, run.count("gpu1", "changed")) == (True, 0)
    assert "runs as vllm and cannot use /opt/vllm/bin/vllm" in _flat(run.output)


def test_a_lane_that_gpuguard_refuses_changes_nothing(site: Site) -> None:
    file = site.system.path("/etc/gpuguard/lanes/tiny.yaml")
    before = file.read_text()
    lanes = site.variables["vllm_lanes"]
    bad = {**lanes["tiny"], "args": {"load-format": "dummy"}}
    environment = {"path": "/opt/engine-2", "requirements": [*_OFFLINE, "PyYAML"]}
    with site.changed(vllm_lanes={**lanes, "tiny": bad}, vllm_environments=[environment]):
        run = site.play("--tags", "vllm")
    assert run.returncode != 0
    assert "lane tiny is refused" in _flat(run.output)
    assert "dummy" in run.output
    assert file.read_text() == before
    assert not site.system.path("/opt/engine-2").exists()


def test_what_cannot_be_meant_as_lanes_is_refused(site: Site) -> None:
    lanes = site.variables["vllm_lanes"]
    for wrong, said in (
        ({"vllm_activate": "tinny"}, "'tinny'"),
        ({"vllm_lanes": {"../tiny": lanes["tiny"]}}, "../tiny"),
        ({"vllm_lanes": {**lanes, "tiny": {"model": {"path": "/srv/model"}}}}, "engine"),
    ):
        with site.changed(**wrong):
            run = site.play("--tags", "vllm")
        assert run.returncode != 0, wrong
        assert said in run.output
    assert site.answers()


def test_images_are_pulled_by_digest_and_cards_are_named_for_the_driver(site: Site) -> None:
    for name, script in _RUNTIME.items():
        program = site.system.path(f"/usr/local/bin/{name}")
        program.write_text(script)
        program.chmod(0o755)
    image = f"registry.example.org/vllm@sha256:{'5' * 64}"
    changed = {
        "vllm_lanes": {"int4": {"engine": {"backend": "quadlet", "image": image}}},
        "vllm_podman_packages": [],
        "vllm_toolkit_packages": [],
        "vllm_registry_auth": {"auths": {"registry.example.org": {"auth": "c2VjcmV0"}}},
    }
    with site.changed(**changed):
        first = site.play_part("vllm", "containers", "-v", "--diff")
        assert first.returncode == 0, first.output
        assert "c2VjcmV0" not in first.output
        assert site.system.path("/srv/pulled").read_text() == (
            f"pull --quiet --authfile /etc/gpuguard/registry/config.json {image}\n"
        )
        again = site.play_part("vllm", "containers")
        assert (again.returncode, again.count("gpu1", "changed")) == (0, 0), again.output
        cards = site.system.path("/etc/cdi/nvidia.yaml")
        cards.write_text("of the driver before: libcuda.so.999.00.01\n")
        renewed = site.play_part("vllm", "containers")
        assert (renewed.returncode, renewed.count("gpu1", "changed")) == (0, 1), renewed.output
        assert "libcuda.so.999.10.01" in cards.read_text()


def test_another_version_of_the_driver_is_refused(site: Site) -> None:
    with site.changed(nvidia_driver_version="999.20.01-1"):
        run = site.play("--tags", "nvidia_driver")
    assert run.returncode != 0
    assert "maintenance window" in run.output
    assert run.count("gpu1", "changed") == 0


def test_a_configuration_that_gpuguard_refuses_does_not_replace_the_old_one(site: Site) -> None:
    before = site.system.path("/etc/gpuguard/gpuguard.yaml").read_text()
    with site.changed(gpuguard_config={"build": {"jobs": "many"}}):
        run = site.play_part("gpuguard", "configure")
    assert run.returncode != 0
    assert "build.jobs" in run.output
    assert site.system.path("/etc/gpuguard/gpuguard.yaml").read_text() == before


def _flat(output: str) -> str:
    return " ".join(output.split())


def _load_another_module(site: Site) -> None:
    """As if somebody had loaded the stock module by hand."""
    note = site.system.path("/srv/lab/kernel/module/nvidia/notes/.note.gnu.build-id")
    note.write_bytes(note.read_bytes()[:-1] + b"?")
    assert site.system.status()["reboot"]["required"]


_OFFLINE = ["--no-index", "--find-links", WHEELS]
# Container runtimes need more than a container gives: programs that do what the role relies on.
_RUNTIME = {
    "podman": '#!/bin/sh\n[ "$1" = image ] && exec grep -qs "$3" /srv/pulled\n'
    'echo "$@" >>/srv/pulled\n',
    "nvidia-ctk": '#!/bin/sh\nmkdir -p /etc/cdi && echo libcuda.so.999.10.01 >"$4"\n',
}
