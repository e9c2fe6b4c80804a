"""``gpuguard reload``: what is decided on given facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuguard.core.facts import (
    DriverFacts,
    HeadersFacts,
    HeadersState,
    Identity,
    InitramfsFacts,
    InitramfsState,
    KernelFacts,
    ModuleFile,
    ResolvedModule,
    SecureBootFacts,
    SecureBootState,
)
from gpuguard.core.reload import Holder, Load, LoadedModule, ReloadFacts, Unload, plan_reload
from tests import toys
from tests.box import K1

NAMES = toys.NAMES


def module(name: str, identity: Identity = Identity.PATCHED) -> ResolvedModule:
    def file(folder: str, build_id: str) -> ModuleFile:
        path = f"/lib/modules/{K1}/updates/{folder}/{name}.ko"
        return ModuleFile(
            path=path, base_name=name, build_id=build_id, version="999.1", vermagic=f"{K1} SMP"
        )

    return ResolvedModule(
        name=name,
        file=file("gpuguard", f"new {name}"),
        identity=identity,
        others=(file("dkms", f"old {name}"),),
    )


def loaded(name: str, build: str = "old", **more: Any) -> LoadedModule:
    users = {"nvidia": ("nvidia-uvm",)}.get(name, ())
    known = {"build_id": f"{build} {name}", "users": users, "references": len(users)}
    return LoadedModule(name=name, **{**known, **more})


KERNEL = KernelFacts(
    release=K1,
    image=f"/boot/vmlinuz-{K1}",
    modules=tuple(module(name) for name in NAMES),
    headers=HeadersFacts(state=HeadersState.PRESENT),
    initramfs=InitramfsFacts(state=InitramfsState.STALE),
)
FACTS = ReloadFacts(
    release=K1,
    kernel=KERNEL,
    driver=DriverFacts(userland="999.1", loaded="999.1"),
    secure_boot=SecureBootFacts(state=SecureBootState.OFF),
    loaded=(loaded("nvidia"), loaded("nvidia-uvm")),
)
VLLM = Holder(pid=7, name="vllm", devices=("/dev/nvidia0",), unit="vllm.service")


def test_users_go_first_and_come_last() -> None:
    order = tuple(loaded(name, users=(), references=0) for name in NAMES)
    plan = plan_reload(replace(FACTS, loaded=order))
    assert plan.refusal is None
    assert [a.module for a in plan.actions if isinstance(a, Unload)] == [
        "nvidia-drm", "nvidia-modeset", "nvidia-uvm", "nvidia-peermem", "nvidia",
    ]  # fmt: skip
    assert [a.module for a in plan.actions if isinstance(a, Load)] == [
        "nvidia", "nvidia-modeset", "nvidia-drm", "nvidia-uvm", "nvidia-peermem",
    ]  # fmt: skip


def test_only_what_was_loaded_is_loaded() -> None:
    plan = plan_reload(FACTS)
    assert plan.actions == (
        Unload(module="nvidia-uvm"),
        Unload(module="nvidia"),
        Load(
            module="nvidia",
            path=f"/lib/modules/{K1}/updates/gpuguard/nvidia.ko",
            build_id="new nvidia",
        ),
        Load(
            module="nvidia-uvm",
            path=f"/lib/modules/{K1}/updates/gpuguard/nvidia-uvm.ko",
            build_id="new nvidia-uvm",
        ),
    )
    assert {old.module: old.path for old in plan.old} == {
        name: f"/lib/modules/{K1}/updates/dkms/{name}.ko" for name in ("nvidia", "nvidia-uvm")
    }


def test_the_right_build_is_nothing_to_do_even_in_use() -> None:
    right = (loaded("nvidia", "new"), loaded("nvidia-uvm", "new"))
    plan = plan_reload(replace(FACTS, loaded=right, holders=(VLLM,)))
    assert (plan.actions, plan.refusal) == ((), None)


def test_one_old_module_among_new_ones_is_swapped() -> None:
    plan = plan_reload(replace(FACTS, loaded=(loaded("nvidia", "new"), loaded("nvidia-uvm"))))
    assert len(plan.actions) == 4


def test_a_build_id_that_cannot_be_read_is_not_the_right_one() -> None:
    plan = plan_reload(replace(FACTS, loaded=(loaded("nvidia", build_id=None),)))
    assert plan.actions
    assert plan.old[0].path is None


def kernel(**more: Any) -> KernelFacts:
    return replace(KERNEL, **more)


@pytest.mark.parametrize(
    ("change", "code", "hint"),
    [
        ({"loaded": ()}, "driver-not-loaded", "modprobe"),
        ({"kernel": None}, "no-module-tree", "on the host itself"),
        ({"kernel": kernel(problem="no modules.dep")}, "no-module-tree", "host"),
        (
            {"kernel": kernel(modules=tuple(module(n, Identity.STOCK) for n in NAMES))},
            "not-patched-on-disk", f"gpuguard rebuild --kernel {K1}",
        ),
        (
            {"kernel": kernel(modules=(module("nvidia"), module("nvidia-uvm", Identity.MISSING)))},
            "not-patched-on-disk", "gpuguard rebuild",
        ),
        ({"driver": DriverFacts(userland="999.2", loaded="999.1")}, "kernel-not-ready", "rebuild"),
        (
            {"secure_boot": SecureBootFacts(state=SecureBootState.ON)},
            "kernel-not-ready", "rebuild",
        ),
        ({"modules_disabled": True}, "modules-disabled", "reboot"),
        ({"loaded": (loaded("nvidia", references=None),)}, "unload-not-supported", "reboot"),
        ({"holders": (VLLM,)}, "cards-in-use", "systemctl stop vllm.service"),
        ({"holders": (replace(VLLM, unit=""),)}, "cards-in-use", "end them"),
        (
            {"loaded": (loaded("nvidia", users=("gdrdrv",), references=1),)},
            "cards-in-use", "modprobe -r gdrdrv",
        ),
        (
            {"loaded": (loaded("nvidia"), loaded("nvidia-drm", users=(), references=1))},
            "cards-in-use", "console",
        ),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], code: str, hint: str) -> None:
    refusal = plan_reload(replace(FACTS, **change)).refusal
    assert refusal is not None
    assert refusal.code == code
    assert hint in refusal.hint
    assert refusal.is_busy == (code == "cards-in-use")
