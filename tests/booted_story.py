"""What stories on a booted machine share: what apt is offered, and waiting for automatic runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import booted_roots
from tests.booted import Machine, prepared
from tests.booted_roots import METAS, Debian, publish
from tests.standin_packages import DRIVER_PACKAGES

REBUILD = "gpuguard-rebuild.service"
QUEUE = "/var/lib/gpuguard/rebuild-wanted"


def story_machine(debian: Debian, folder: Path) -> Iterator[Machine]:
    """A machine for one module's story; skips where none can be made, but never in CI."""
    if reason := booted_roots.missing():
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    with prepared(debian, folder) as machine:
        yield machine


def kernel(system: Machine, release: str) -> dict[str, Any]:
    """A kernel as status has it; empty if it is not installed."""
    return next((k for k in system.status()["kernels"] if k["release"] == release), {})


def is_idle(system: Machine) -> bool:
    """Nothing is queued, and no automatic run is under way."""
    return not system.path(QUEUE).exists() and system.show(REBUILD, "ActiveState") in (
        "inactive", "failed",
    )  # fmt: skip


def wait_until_idle(system: Machine, timeout: float = 240) -> None:
    system.wait_for(lambda: is_idle(system), timeout, f"{REBUILD} is done")


def wait_until_ready(system: Machine, *releases: str) -> None:
    """The automatic run has come, and has left the kernels ready and nothing queued."""
    system.wait_for(
        lambda: is_idle(system) and all(kernel(system, r).get("ready") for r in releases),
        240,
        f"{releases} are ready and {REBUILD} is done",
    )
    assert system.show(REBUILD, "Result") == "success"


def kernel_files(system: Machine) -> list[str]:
    """Packages of the newer kernel, as they lie in the repository."""
    return booted_roots.kernel_files(system.root)


def metas(system: Machine) -> list[str]:
    """Packages that pull in the newer kernel."""
    return [f"{name}_{system.base.new_version}_amd64.deb" for name in METAS]


def driver_files(version: str) -> list[str]:
    return [f"{name}_{version}-1_amd64.deb" for name in DRIVER_PACKAGES]


def offer(system: Machine, *names: str) -> None:
    """What apt knows from now on."""
    publish(system.root, *names)
    system.apt("update")
