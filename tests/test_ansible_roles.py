"""The Ansible roles as texts: linted, their arguments documented, their promises kept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuguard import __version__
from tests import ansible_kit
from tests.ansible_kit import ANSIBLE

ROLES = sorted(path.name for path in (ANSIBLE / "roles").iterdir())


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def specs_of(role: str) -> dict[str, Any]:
    """Entry point -> what is documented of it."""
    return dict(load(ANSIBLE / f"roles/{role}/meta/argument_specs.yml")["argument_specs"])


def tasks_of(path: Path) -> Iterator[dict[str, Any]]:
    """Every task of a file, those of blocks, too."""

    def walk(tasks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for task in tasks:
            yield task
            for key in ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks"):
                yield from walk(task.get(key, []))

    return walk(load(path))


def every_task() -> Iterator[tuple[str, dict[str, Any]]]:
    shapes = ("*.yml", "tasks/*.yml", "roles/*/tasks/*.yml", "roles/*/handlers/*.yml")
    for path in sorted(path for shape in shapes for path in ANSIBLE.glob(shape)):
        if path.name == "requirements.yml":
            continue
        for task in tasks_of(path):
            yield str(path.relative_to(ANSIBLE)), task


def _includes(task: dict[str, Any], tasks: str) -> bool:
    file = task.get("ansible.builtin.include_tasks")
    role = task.get("ansible.builtin.include_role", {})
    return file == f"{tasks.removesuffix('.yml')}.yml" or role.get("tasks_from") == tasks


@pytest.mark.slow
def test_ansible_lint_finds_nothing_in_its_production_profile() -> None:
    done = subprocess.run(
        [ansible_kit.tool("ansible-lint"), "--nocolor"],
        cwd=ANSIBLE, text=True, capture_output=True, check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "Profile 'production' was required" in done.stderr + done.stdout


@pytest.mark.slow
def test_the_examples_are_no_part_of_the_inventory(tmp_path: Path) -> None:
    shutil.copytree(ANSIBLE / "inventory", tmp_path / "inventory")
    shutil.copy(ANSIBLE / "ansible.cfg", tmp_path)
    (tmp_path / "inventory/hosts.yml").write_text("gpu_hosts: {hosts: {gpu1: {}}}\n")
    done = subprocess.run(
        [ansible_kit.tool("ansible-inventory"), "--graph"],
        cwd=tmp_path, text=True, capture_output=True, check=False,
        env={**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg")},
    )  # fmt: skip
    assert "gpu1" in done.stdout
    assert "Failed to parse" not in done.stderr


@pytest.mark.parametrize("role", ROLES)
def test_documented_arguments_are_the_defaults(role: str) -> None:
    defaults = load(ANSIBLE / f"roles/{role}/defaults/main.yml") or {}
    for name, entry in specs_of(role).items():
        options = entry["options"]
        documented = {key: spec["default"] for key, spec in options.items() if "default" in spec}
        required = {key for key, spec in options.items() if spec.get("required")}
        assert documented == defaults, f"{role}, {name}"
        assert set(options) == set(defaults) | required
        for key, spec in options.items():
            assert key.startswith(f"{role}_")
            assert spec["description"].strip().endswith(".")


@pytest.mark.parametrize("role", ROLES)
def test_every_entry_point_has_its_tasks(role: str) -> None:
    for name in specs_of(role):
        assert (ANSIBLE / f"roles/{role}/tasks/{name}.yml").is_file()


def test_every_variable_of_the_roles_is_in_the_readme() -> None:
    text = (ANSIBLE / "README.md").read_text()
    for role in ROLES:
        defaults = load(ANSIBLE / f"roles/{role}/defaults/main.yml") or {}
        assert [key for key in defaults if f"`{key}`" not in text] == []


def test_the_roles_install_the_version_that_they_belong_to() -> None:
    assert load(ANSIBLE / "roles/gpuguard/defaults/main.yml")["gpuguard_version"] == __version__


def test_pinned_versions_are_within_what_gpuguard_asks_for() -> None:
    from packaging.requirements import Requirement

    lines = (ANSIBLE / "roles/gpuguard/files/constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    lowered = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    project = ansible_kit.project()
    for text in (*project["dependencies"], *project["optional-dependencies"]["deep"]):
        requirement = Requirement(text)
        assert requirement.specifier.contains(lowered[requirement.name.lower()]), text


def test_nothing_is_said_to_the_running_kernel() -> None:
    # CASES C59: facts describe yesterday's kernel
    texts = {p: p.read_text() for p in ANSIBLE.rglob("*") if p.is_file() and p.suffix != ".md"}
    pattern = re.compile(r"ansible_kernel|ansible_facts\W+kernel|uname")
    assert [str(path) for path, text in texts.items() if pattern.search(text)] == []


def test_holds_are_gpuguards_business() -> None:
    for where, task in every_task():
        assert "ansible.builtin.dpkg_selections" not in task, where
        apt = task.get("ansible.builtin.apt", {})
        loose = ("force", "upgrade", "allow_change_held_packages", "allow_downgrade")
        assert [key for key in loose if apt.get(key)] == [], where
        assert "apt-mark" not in str(task), where


def test_a_reboot_waits_for_gpuguards_word_and_for_who_holds_it_back() -> None:
    reboots = [(where, task) for where, task in every_task() if "ansible.builtin.reboot" in task]
    ((where, task),) = reboots
    assert where == "roles/gpuguard/tasks/restart.yml"
    words = task["ansible.builtin.reboot"]["reboot_command"].split()
    assert words == ["systemctl", "reboot", "--check-inhibitors=yes"]
    callers = [(where, task) for where, task in every_task() if _includes(task, "restart")]
    assert {where for where, _ in callers} == {
        "roles/nvidia_driver/tasks/reboot.yml", "roles/nvidia_driver/tasks/restart.yml",
        "tasks/upgrade_window.yml",
    }  # fmt: skip
    for where, task in callers:
        if where != "roles/nvidia_driver/tasks/restart.yml":  # included by the first one alone
            condition = str(task["when"])
            assert re.search(r"reboot_is_due|is_waiting", condition), where
            assert ".safe" in condition, where


def test_a_failure_is_no_business_of_a_rescue() -> None:
    # with any_errors_fatal, and a block in an included file, ansible-core 2.19 runs no rescue,
    # counts no failure, and goes on to the next host: seen in test_ansible_rolling.py
    for where, task in every_task():
        assert not {"rescue", "always"} & set(task), where


def test_nobody_is_rebooted_who_did_not_ask() -> None:
    assert load(ANSIBLE / "roles/nvidia_driver/defaults/main.yml")["nvidia_driver_reboot"] is False
    (task,) = [t for where, t in every_task() if _includes(t, "restart.yml")]
    assert "nvidia_driver_reboot" in task["when"]


def test_what_runs_the_roles_is_pinned() -> None:
    from packaging.requirements import Requirement

    for text in ansible_kit.project()["optional-dependencies"]["ansible"]:
        operators = {one.operator for one in Requirement(text).specifier}
        assert operators & {"==", "~=", "<", "<="}, f"{text}: no upper bound"
    wanted = load(ANSIBLE / "requirements.yml")
    for entry in (*wanted["roles"], *wanted["collections"]):
        assert re.fullmatch(r"(==)?\d[\w.]*", str(entry["version"])), entry


def test_nothing_is_needed_that_requirements_do_not_name() -> None:
    named = {entry["name"] for entry in load(ANSIBLE / "requirements.yml")["collections"]}
    for where, task in every_task():
        for key in task:
            collection = key.rpartition(".")[0]
            assert not collection or collection in {"ansible.builtin", *named}, f"{where}: {key}"


def test_files_have_an_owner_and_a_mode_in_quotes() -> None:
    for where, task in every_task():
        for module in ("copy", "template", "file"):
            entry = task.get(f"ansible.builtin.{module}")
            if entry is None or entry.get("state") in ("absent", "link"):
                continue
            assert {entry.get("owner"), entry.get("group")} >= {"root"}, f"{where}: {task['name']}"
            assert re.fullmatch(r"0[0-7]{3}", str(entry.get("mode"))), f"{where}: {task['name']}"
            assert isinstance(entry["mode"], str)


def test_no_shell_puts_words_together() -> None:
    for where, task in every_task():
        assert not {"ansible.builtin.shell", "ansible.builtin.raw"} & set(task), where
        command = task.get("ansible.builtin.command")
        assert command is None or set(command) <= {"argv", "creates"}, f"{where}: {task['name']}"


def test_handlers_of_the_vllm_role_restart_nothing() -> None:
    for task in load(ANSIBLE / "roles/vllm/handlers/main.yml"):
        unit = task["ansible.builtin.systemd_service"]
        assert unit.get("daemon_reload") or unit["state"] == "reloaded", task["name"]
    for where, task in every_task():
        unit = task.get("ansible.builtin.systemd_service", {})
        assert "lane" not in str(unit.get("name", "")), f"{where}: lanes are gpuguard's"


def test_systemd_is_not_told_to_reload_everything() -> None:
    # CASES C57: a reload takes the cards away from running containers
    for where, task in every_task():
        unit = task.get("ansible.builtin.systemd_service", {})
        assert not unit.get("daemon_reload") or where.endswith("handlers/main.yml"), where


def test_secrets_are_in_no_output() -> None:
    secrets = {
        name
        for role in ROLES
        for entry in specs_of(role).values()
        for name, spec in entry["options"].items()
        if spec.get("no_log")
    }
    assert secrets
    users = [
        (where, task)
        for where, task in every_task()
        if any(name in str({k: v for k, v in task.items() if k not in ("when", "block")})
               for name in (*secrets, "__monitoring_alertmanager"))
    ]  # fmt: skip
    writers = [(where, task) for where, task in users if "ansible.builtin.copy" in task]
    assert writers
    assert [where for where, task in writers if task.get("no_log") is not True] == []
