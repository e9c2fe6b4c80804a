"""The doctor on trees: do serving units use P2P, and are vLLM's caches still true."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuguard.core.doctor_facts import ServingUnit, Unread
from gpuguard.core.doctor_serving import parse_level
from gpuguard.host import LocalHost
from gpuguard.probes.serving_env import probe_serving
from gpuguard.probes.vllm_cache import parse_vllm_cache
from tests.doctor_kit import PORTS, SECOND, Doctor, card, machine
from tests.trees import Link, make_tree
from tests.unprivileged import as_nobody, public_dir

UNIT = "/etc/systemd/system/vllm.service"
SERVE = "ExecStart=/opt/vllm/bin/vllm serve model\n"
BOOTED = 1764400000


def unit(more: str = "", serve: str = SERVE) -> str:
    return f"[Unit]\nDescription=model\n[Service]\n{serve}{more}"


def units(tmp_path: Path, files: dict[str, str]) -> tuple[ServingUnit, ...]:
    found = probe_serving(LocalHost(make_tree(tmp_path, files)))
    assert not isinstance(found, Unread)
    return found


def settings(found: ServingUnit) -> dict[str, str]:
    return {name: setting.value for name, setting in found.environment}


# What NCCL is told


def test_cards_behind_the_cpu_need_the_level(tmp_path: Path) -> None:
    doctor = Doctor(machine(tmp_path, **{UNIT: unit()}))
    found = doctor.only("nccl")
    assert (found["code"], found["subject"]) == ("nccl-p2p-level", "vllm.service")
    assert "NCCL_P2P_LEVEL is not set, and the cards are behind the CPU (PHB)" in found["message"]
    assert found["evidence"]["needed"] == "PHB"
    assert found["source"] == UNIT


@pytest.mark.parametrize(
    ("level", "good"),
    [("PHB", True), ("SYS", True), ("3", True), ("5", True), ("PXB", False), ("2", False),
     ("NODE", False), ("phb", False), ("LOC", False)],
)  # fmt: skip
def test_levels_as_nccl_reads_them(tmp_path: Path, level: str, good: bool) -> None:
    machine(tmp_path, **{UNIT: unit(f"Environment=NCCL_P2P_LEVEL={level}\n")})
    assert Doctor(tmp_path).state("nccl") == ("ok" if good else "problem")


def test_a_word_that_nccl_does_not_know_is_said(tmp_path: Path) -> None:
    machine(tmp_path, **{UNIT: unit("Environment=NCCL_P2P_LEVEL=NODE\n")})
    assert "does not know that word" in Doctor(tmp_path).only("nccl")["message"]


def test_cards_below_one_switch_need_nothing(tmp_path: Path) -> None:
    switch = "/sys/devices/pci0000:00/0000:00:01.0/0000:02:00.0"
    machine(tmp_path, **{UNIT: unit()})
    for address, port in (("0000:01:00.0", "0000:03:00.0"), (SECOND, "0000:03:01.0")):
        link = tmp_path / "sys/bus/pci/devices" / address
        old = link.resolve()
        link.unlink()
        new = tmp_path / f"{switch}/{port}".lstrip("/")
        new.mkdir(parents=True)
        old.rename(new / address)
        link.symlink_to(f"../../../{(new / address).relative_to(tmp_path / 'sys')}")
    check = Doctor(tmp_path).check("nccl")
    assert check["state"] == "ok"
    assert check["summary"] == "1 serving unit"


def test_other_numa_nodes_need_sys(tmp_path: Path) -> None:
    root, port = PORTS[SECOND]
    machine(tmp_path, **{UNIT: unit(), f"/sys/devices/{root}/{port}/{SECOND}/numa_node": "1\n"})
    assert Doctor(tmp_path).only("nccl")["evidence"]["needed"] == "SYS"


def test_two_cards_of_an_amd_host_have_sys_by_default(tmp_path: Path) -> None:
    machine(
        tmp_path, **{UNIT: unit(), "/proc/cpuinfo": "vendor_id\t: AuthenticAMD\nflags\t: fpu\n"}
    )
    assert Doctor(tmp_path).state("nccl") == "ok"


def test_one_card_needs_nothing(tmp_path: Path) -> None:
    machine(tmp_path, card(SECOND), **{UNIT: unit()})
    assert Doctor(tmp_path).state("nccl") == "ok"


def test_a_left_over_escape_hatch(tmp_path: Path) -> None:
    """CASES C55: P2P paid for, switched off."""
    files = {UNIT: unit("EnvironmentFile=/etc/vllm.env\n"), "/etc/vllm.env": "NCCL_P2P_DISABLE=1\n"}
    found = Doctor(machine(tmp_path, **files)).only("nccl")
    assert found["code"] == "nccl-p2p-disabled"
    assert "paid for, switched off" in found["message"]
    assert found["source"] == "/etc/vllm.env"


def test_disabled_with_anything_but_one_is_not_disabled(tmp_path: Path) -> None:
    machine(tmp_path, **{UNIT: unit("Environment=NCCL_P2P_DISABLE=true NCCL_P2P_LEVEL=SYS\n")})
    assert Doctor(tmp_path).state("nccl") == "ok"


def test_no_serving_units(tmp_path: Path) -> None:
    files = {"/usr/lib/systemd/system/cron.service": unit(serve="ExecStart=/usr/sbin/cron -f\n")}
    assert Doctor(machine(tmp_path, **files)).state("nccl") == "not-applicable"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user than oneself")
def test_a_closed_environment_file_is_unknown() -> None:
    with public_dir() as root:
        machine(
            root,
            **{
                UNIT: unit("Environment=NCCL_P2P_LEVEL=SYS\nEnvironmentFile=/etc/vllm.env\n"),
                "/etc/vllm.env": "HF_TOKEN=secret\n",
            },
        )
        (root / "etc/vllm.env").chmod(0o600)
        with as_nobody():
            assert Doctor(root).state("nccl") == "unknown"
        assert Doctor(root).state("nccl") == "ok"


@pytest.mark.parametrize(
    ("value", "level"),
    [("SYS", "SYS"), ("0", "LOC"), ("4", "SYS"), ("99", "SYS"), ("NODE", None), ("", None)],
)
def test_level_words(value: str, level: str | None) -> None:
    assert parse_level(value) == level


# Where variables are set


def test_drop_ins_and_files_in_their_order(tmp_path: Path) -> None:
    (found,) = units(
        tmp_path,
        {
            "/usr/lib/systemd/system/vllm.service": unit("Environment=NCCL_P2P_LEVEL=PIX\n"),
            f"{UNIT}.d/20-b.conf": "[Service]\nEnvironment=NCCL_P2P_LEVEL=PHB\n",
            f"{UNIT}.d/10-a.conf": "[Service]\nEnvironment=\nEnvironment=NCCL_P2P_DISABLE=1\n",
            f"{UNIT}.d/30-c.conf": "[Service]\nEnvironmentFile=-/etc/none.env\n"
            "EnvironmentFile=/etc/vllm/*.env\nUnsetEnvironment=NCCL_P2P_DISABLE\n",
            "/etc/vllm/1.env": "# comment\nexport NCCL_P2P_LEVEL='SYS'\nHF_TOKEN=secret\n",
            "/run/systemd/system/vllm.service.d/10-a.conf": "[Service]\nEnvironment=X=hidden\n",
        },
    )
    assert settings(found) == {"NCCL_P2P_LEVEL": "SYS"}
    assert found.setting("NCCL_P2P_LEVEL") is not None
    assert found.environment[0][1].source == "/etc/vllm/1.env"
    assert found.unread == ()


def test_secrets_are_not_kept(tmp_path: Path) -> None:
    (found,) = units(tmp_path, {UNIT: unit("Environment=HF_TOKEN=secret NCCL_P2P_LEVEL=SYS\n")})
    assert "secret" not in repr(found)


def test_nccl_conf_counts_outside_containers(tmp_path: Path) -> None:
    docker = "ExecStart=/usr/bin/docker run --gpus all vllm/vllm-openai\n"
    found = units(
        tmp_path,
        {
            UNIT: unit(),
            "/etc/systemd/system/box.service": unit(serve=docker),
            "/etc/nccl.conf": "NCCL_P2P_LEVEL=SYS\n",
        },
    )
    assert {f.name: settings(f) for f in found} == {
        "box.service": {}, "vllm.service": {"NCCL_P2P_LEVEL": "SYS"},
    }  # fmt: skip


def test_a_container_sees_what_its_command_line_hands_on(tmp_path: Path) -> None:
    docker = (
        "Environment=NCCL_P2P_LEVEL=PIX NCCL_P2P_DISABLE=1\n"
        "ExecStart=/usr/bin/docker run --rm --gpus all -e NCCL_P2P_LEVEL \\\n"
        "  # a comment between\n"
        "  --env=VLLM_SKIP_P2P_CHECK=0 --env-file /etc/box.env -v /srv/cache:/root/.cache vllm\n"
    )
    (found,) = units(
        tmp_path, {UNIT: unit(serve=docker), "/etc/box.env": "NCCL_P2P_DISABLE=0\nA=B\n"}
    )
    assert settings(found) == {
        "NCCL_P2P_LEVEL": "PIX", "VLLM_SKIP_P2P_CHECK": "0", "NCCL_P2P_DISABLE": "0",
    }  # fmt: skip
    assert found.cache_dirs == ("/srv/cache/vllm",)


def test_a_quadlet(tmp_path: Path) -> None:
    text = (
        "[Container]\nImage=docker.io/vllm/vllm-openai\nAddDevice=nvidia.com/gpu=all\n"
        "Environment=NCCL_P2P_LEVEL=SYS\nVolume=hub:/root/.cache:Z\n"
    )
    (found,) = units(tmp_path, {"/etc/containers/systemd/model.container": text})
    assert (found.name, settings(found)) == ("model.container", {"NCCL_P2P_LEVEL": "SYS"})
    assert found.cache_dirs == ("/var/lib/docker/volumes/hub/_data/vllm",)


def test_a_compose_file(tmp_path: Path) -> None:
    compose = """\
services:
  web: {image: nginx}
  list:
    image: vllm/vllm-openai
    environment: [NCCL_P2P_LEVEL=SYS, HF_TOKEN]
    volumes: [/srv/hub:/root/.cache/vllm:rw]
  map:
    image: other
    environment: {NCCL_P2P_DISABLE: 1, VLLM_SKIP_P2P_CHECK: false, HF_TOKEN: null}
    env_file: model.env
    volumes: [{type: bind, source: /srv/two, target: /root/.cache}]
    deploy: {resources: {reservations: {devices: [{driver: nvidia, capabilities: [gpu]}]}}}
"""
    docker = "WorkingDirectory=/srv/model\nExecStart=/usr/bin/docker compose up\n"
    found = units(
        tmp_path,
        {
            UNIT: unit(serve=docker),
            "/srv/model/compose.yaml": compose,
            "/srv/model/model.env": "NCCL_P2P_LEVEL=PHB\n",
        },
    )
    assert {f.name: settings(f) for f in found} == {
        "vllm.service/list": {"NCCL_P2P_LEVEL": "SYS"},
        "vllm.service/map": {
            "NCCL_P2P_LEVEL": "PHB", "NCCL_P2P_DISABLE": "1", "VLLM_SKIP_P2P_CHECK": "false",
        },
    }  # fmt: skip
    assert [f.cache_dirs for f in found] == [("/srv/hub",), ("/srv/two/vllm",)]


@pytest.mark.parametrize(
    "text", ["services: [1, 2\n", "just text\n", "services: {a: {x: vllm}, b: 3}\n"]
)
def test_a_damaged_compose_file_is_no_traceback(tmp_path: Path, text: str) -> None:
    docker = "ExecStart=docker-compose -f /srv/c.yaml up\n"
    found = units(tmp_path, {UNIT: unit(serve=docker), "/srv/c.yaml": text})
    assert [f.name for f in found]


def test_instances_of_a_template(tmp_path: Path) -> None:
    wants = "/etc/systemd/system/multi-user.target.wants"
    found = units(
        tmp_path,
        {
            "/etc/systemd/system/vllm@.service": unit("EnvironmentFile=/etc/vllm/%i.env\n"),
            f"{wants}/.keep": "",
            "/etc/vllm/fp8.env": "NCCL_P2P_LEVEL=SYS\n",
        },
    )
    assert found == ()
    (tmp_path / wants.lstrip("/") / "vllm@fp8.service").symlink_to("../vllm@.service")
    (one,) = units(tmp_path, {})
    assert (one.name, settings(one)) == ("vllm@fp8.service", {"NCCL_P2P_LEVEL": "SYS"})


def test_a_masked_unit_serves_nothing(tmp_path: Path) -> None:
    make_tree(tmp_path, {UNIT: Link("/dev/null"), "/usr/lib/systemd/system/vllm.service": unit()})
    found = units(tmp_path, {})
    assert [settings(f) for f in found] in ([], [{}])


# Caches of vLLM


def cached(tmp_path: Path, text: str, *, age: int = 60, more: str = "") -> Doctor:
    machine(
        tmp_path,
        **{
            UNIT: unit(f"User=model\nEnvironment=NCCL_P2P_LEVEL=SYS\n{more}"),
            "/etc/passwd": "root:x:0:0::/root:/bin/sh\nmodel:x:900:900::/srv/model:/bin/sh\n",
            CACHE: text,
        },
    )
    os.utime(tmp_path / CACHE.lstrip("/"), (BOOTED + age, BOOTED + age))
    return Doctor(tmp_path)


CACHE = "/srv/model/.cache/vllm/gpu_p2p_access_cache_for_0,1.json"
PAIRS = '{"0->0": true, "0->1": true, "1->0": true, "1->1": true}'


def test_a_cache_of_this_boot_is_fine(tmp_path: Path) -> None:
    assert cached(tmp_path, PAIRS).check("vllm-cache")["summary"] == "1 cache file, of this boot"


def test_a_cache_of_an_earlier_boot(tmp_path: Path) -> None:
    found = cached(tmp_path, PAIRS, age=-60).only("vllm-cache")
    assert (found["code"], found["subject"]) == ("vllm-cache-stale", CACHE)
    assert "before this boot" in found["message"]
    assert found["remedy"].startswith(f"rm {CACHE};")
    assert found["evidence"]["modified"] == "2025-11-29T07:05:40Z"


def test_a_cache_about_more_cards(tmp_path: Path) -> None:
    text = '{"0->3": true, "1->2": true}'
    assert "about 4 cards, there are 2" in cached(tmp_path, text).only("vllm-cache")["message"]


def test_a_cache_in_another_place(tmp_path: Path) -> None:
    other = "/var/cache/vllm/gpu_p2p_access_cache_for_0.json"
    make_tree(tmp_path, {other: PAIRS})
    os.utime(tmp_path / other.lstrip("/"), (1, 1))
    doctor = cached(tmp_path, PAIRS, more="Environment=VLLM_CACHE_ROOT=/var/cache/vllm\n")
    assert doctor.only("vllm-cache")["subject"] == other


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"a": true}', '"x"', "7"])
def test_a_damaged_cache(tmp_path: Path, text: str) -> None:
    assert "not what vLLM writes" in cached(tmp_path, text).only("vllm-cache")["message"]


def test_what_a_cache_says() -> None:
    assert parse_vllm_cache('{"0->1": true, "1->0": false}') == (2, 1)
