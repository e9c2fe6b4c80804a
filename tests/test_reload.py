"""``gpuguard reload``: the swap, with stand-ins on a pretended kernel.

Modules cannot be loaded where tests run: see ``pretended_kernel``. All else is real: depmod,
``modprobe --show-depends``, toy modules with real build-ids.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from gpuguard.apply.reload import swap
from gpuguard.cli.context import Context
from gpuguard.cli.reload import reload
from gpuguard.errors import GpuguardError, Interrupted
from gpuguard.host import LocalHost
from gpuguard.host.paths import resolve_in_root
from gpuguard.probes.holders import probe_holders, probe_loaded
from gpuguard.verbs.reload import decide
from tests import toys
from tests.box import K1, Box, build_id_of, furnish
from tests.pretended_kernel import install_tools, put, unload
from tests.trees import Link, make_tree


class LiveTree(LocalHost):
    """A tree that says it is the running machine."""

    @property
    def is_live(self) -> bool:
        return True

    def path(self, absolute: str, *, follow: bool = True) -> Path:
        return resolve_in_root(self.root, absolute, follow_last=follow)

    def inside(self, path: Path) -> str:
        return "/" + str(path.relative_to(self.root))


class Machine:
    """A box whose stock modules are loaded, with the patched ones on disk."""

    def __init__(self, box: Box, *, rebuilt: bool = True) -> None:
        self.box, self.root = box, box.root
        for name in ("nvidia", "nvidia-modeset", "nvidia-drm", "nvidia-uvm"):
            put(self.root, box.dkms_copy(K1, name), name)
        if rebuilt:
            box.rebuilt("--kernel", K1)

    def run(self, *words: str, as_json: bool = False) -> Result:
        app = typer.Typer()
        app.command()(reload)
        host = LiveTree(self.root)
        context = Context(host=host, config_file="/etc/gpuguard/gpuguard.yaml", json=as_json)
        return CliRunner().invoke(app, list(words), obj=context)

    def error(self, *words: str) -> GpuguardError:
        result = self.run(*words)
        assert isinstance(result.exception, GpuguardError), result
        return result.exception

    def calls(self) -> list[str]:
        file = self.root / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def loaded(self) -> dict[str, str | None]:
        """Name -> "old", "new" or another build-id."""
        ids = {}
        for module in probe_loaded(LocalHost(self.root)):
            old = build_id_of(self.box.dkms_copy(K1, module.name))
            new = build_id_of(self.ours(module.name)) if self.ours(module.name).exists() else None
            ids[module.name] = {old: "old", new: "new"}.get(module.build_id, module.build_id)
        return ids

    def ours(self, name: str) -> Path:
        return self.box.tree(K1) / "updates/gpuguard" / f"{name}.ko"

    def spoil(self, path: Path) -> None:
        """This file does not load."""
        path.with_name(f"{path.name}.bad").touch()

    def hold(self, pid: int, device: str, **more: str) -> None:
        """A process that has a device open."""
        make_tree(self.root, {f"proc/{pid}/fd/3": Link(device)})
        make_tree(self.root, {f"proc/{pid}/{name}": text for name, text in more.items()})


@pytest.fixture
def machine(empty_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine(furnish(empty_root, K1))
    folder = tmp_path / "bin"
    install_tools(folder, empty_root)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return made


NEW = dict.fromkeys(("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm"), "new")
OLD = dict.fromkeys(NEW, "old")


def test_the_patched_modules_are_loaded(machine: Machine) -> None:
    assert machine.loaded() == OLD
    result = machine.run()
    assert result.exit_code == 0, result
    assert machine.loaded() == NEW
    assert machine.calls() == [
        "rmmod nvidia_drm", "rmmod nvidia_modeset", "rmmod nvidia_uvm", "rmmod nvidia",
        "modprobe nvidia", "modprobe nvidia-modeset", "modprobe nvidia-drm", "modprobe nvidia-uvm",
    ]  # fmt: skip
    assert "the patched modules are loaded: nvidia " in result.output
    assert "P2P is unknown" in result.output  # no library that would answer


def test_a_second_time_there_is_nothing_to_do(machine: Machine) -> None:
    machine.run()
    calls = machine.calls()
    result = machine.run(as_json=True)
    assert (result.exit_code, json.loads(result.output)["outcome"]) == (0, "nothing-to-do")
    assert machine.calls() == calls


def test_a_dry_run_changes_nothing(machine: Machine) -> None:
    before = machine.box.snapshot()
    result = machine.run("--dry-run")
    assert result.output.splitlines()[0] == "unload nvidia-drm"
    assert result.output.splitlines()[4] == (
        f"load   nvidia from /lib/modules/{K1}/updates/gpuguard/nvidia.ko"
    )
    document = json.loads(machine.run("--dry-run", as_json=True).output)
    assert document["outcome"] == "planned"
    assert [a["action"] for a in document["actions"]] == ["unload"] * 4 + ["load"] * 4
    after = machine.box.snapshot()
    assert {p: w for p, w in after.items() if not p.startswith("run")} == before
    assert machine.calls() == []


def test_who_holds_the_cards_is_named_and_nothing_changes(machine: Machine) -> None:
    machine.hold(4711, "/dev/nvidia0", comm="python3\n", cgroup="0::/system.slice/vllm.service\n")
    machine.hold(815, "/dev/nvidiactl", comm="nvidia-persiste\n")
    machine.hold(42, "/dev/null", comm="cron\n")
    error = machine.error()
    assert (error.code, error.exit_status) == ("cards-in-use", 75)
    assert error.detail.splitlines() == [
        "815 nvidia-persiste: /dev/nvidiactl",
        "4711 python3 (vllm.service): /dev/nvidia0",
    ]
    assert "systemctl stop vllm.service" in error.hint
    assert (machine.calls(), machine.loaded()) == ([], OLD)
    planned = machine.run("--dry-run", as_json=True)
    document = json.loads(planned.output)
    assert planned.exit_code == 75
    assert document["refusal"]["code"] == "cards-in-use"
    assert [holder["pid"] for holder in document["holders"]] == [815, 4711]


def test_a_display_server_holds_the_card_by_its_drm_node(machine: Machine) -> None:
    device = "/sys/bus/pci/devices/0000:01:00.0"
    files = {f"{device}/vendor": "0x10de\n", f"{device}/class": "0x030000\n"}
    make_tree(machine.root, {**files, f"{device}/drm/card1/dev": "226:1\n"})
    machine.hold(9, "/dev/dri/card1", comm="Xorg\n")
    machine.hold(10, "/dev/dri/card0", comm="other\n")
    found = probe_holders(LocalHost(machine.root))
    assert [(holder.pid, holder.name) for holder in found] == [(9, "Xorg")]


def test_nvml_names_processes_of_other_namespaces(machine: Machine) -> None:
    (found,) = probe_holders(LocalHost(machine.root), [77])
    assert (found.pid, found.name, found.devices) == (77, "?", ("(as NVML says)",))


def test_stock_on_disk_is_refused(empty_root: Path) -> None:
    stock = Machine(furnish(empty_root, K1), rebuilt=False)
    answer = stock.box.json("reload", "--dry-run")
    assert answer.status == 69
    assert answer.document["refusal"]["code"] == "not-patched-on-disk"


def test_a_tree_is_refused(machine: Machine) -> None:
    answer = machine.box.json("reload")
    assert (answer.status, answer.error["code"]) == (2, "live-only")
    assert machine.box.json("reload", "--dry-run").document["outcome"] == "planned"


def test_it_needs_root(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert machine.error().code == "needs-root"


# Failures on the way


def test_a_user_that_comes_in_between(machine: Machine) -> None:
    (machine.root / "stuck-nvidia").touch()
    error = machine.error()
    assert (error.code, error.exit_status) == ("reload-failed", 70)
    assert "rmmod nvidia exited with 1" in error.message
    assert "Module nvidia is in use" in error.detail
    assert machine.loaded() == OLD


@pytest.mark.parametrize("name", ["nvidia", "nvidia-drm", "nvidia-uvm"])
def test_a_new_module_that_does_not_load(machine: Machine, name: str) -> None:
    machine.spoil(machine.ours(name))
    error = machine.error()
    assert (error.code, error.exit_status) == ("reload-failed", 70)
    assert f"modprobe {name} exited with 1" in error.message
    assert "Unknown symbol" in error.detail
    assert "loaded now: nvidia " in error.detail
    assert machine.loaded() == OLD
    assert f"insmod /lib/modules/{K1}/updates/dkms/nvidia.ko" in machine.calls()


def test_the_old_ones_get_their_options(machine: Machine) -> None:
    line = 'options nvidia NVreg_RegistryDwords="a=1;b=2"\noptions nvidia-drm modeset=1\n'
    make_tree(machine.root, {"etc/modprobe.d/nvidia.conf": line})
    machine.spoil(machine.ours("nvidia"))
    machine.error()
    folder = f"/lib/modules/{K1}/updates/dkms"
    assert f"insmod {folder}/nvidia.ko NVreg_RegistryDwords=a=1;b=2" in machine.calls()
    assert f"insmod {folder}/nvidia-drm.ko modeset=1" in machine.calls()


def test_neither_new_nor_old_load(machine: Machine) -> None:
    machine.spoil(machine.ours("nvidia"))
    machine.spoil(machine.box.dkms_copy(K1))
    error = machine.error()
    assert (error.code, error.exit_status) == ("reload-incomplete", 71)
    assert "insmod" in error.detail
    assert "loaded now: nvidia-uvm " in error.detail or "loaded now: " in error.detail


def test_the_old_build_is_no_longer_on_disk(machine: Machine) -> None:
    elsewhere = toys.toy_module(machine.root / "old/nvidia.ko", release=K1, seed="older")
    for name in ("nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia"):
        assert unload(machine.root, name) == 0
    put(machine.root, elsewhere, "nvidia")
    put(machine.root, machine.box.dkms_copy(K1, "nvidia-uvm"), "nvidia-uvm")
    machine.spoil(machine.ours("nvidia-uvm"))
    error = machine.error()
    assert error.code == "reload-incomplete"
    assert "no file of the old build of nvidia is in /lib/modules" in error.detail
    assert machine.loaded() == {"nvidia": "new"}  # better than none, and not mixed


def test_a_build_that_is_not_recorded_is_not_loaded(machine: Machine) -> None:
    for name in NEW:
        toys.toy_module(machine.ours(name), name=name, release=K1, seed=f"other {name}")
    assert machine.error().code == "not-patched-on-disk"
    assert (machine.calls(), machine.loaded()) == ([], OLD)


def test_an_interruption_puts_the_old_ones_back(machine: Machine) -> None:
    def stop(line: str) -> None:
        if line == "modprobe nvidia-drm":
            raise Interrupted(signal.SIGTERM)

    host = LiveTree(machine.root)
    _, plan = decide(host, None)
    with pytest.raises(Interrupted):
        swap(host, plan, stop)
    assert machine.loaded() == OLD
