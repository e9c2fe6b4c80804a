"""What stories on a booted machine share: what apt is offered, and waiting for automatic runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import booted_roots
from tests.booted import Machine, prepared
from tests.booted_roots import ARCHIVE, Debian, publish
from tests.standin_packages import DRIVER_PACKAGES

REBUILD = "gpuguard-rebuild.service"
QUEUE = "/var/lib/gpuguard/rebuild-wanted"
METAS = ("linux-image-cloud-amd64", "linux-headers-cloud-amd64")


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
    return [name for name in _kernel_debs(system) if not name.startswith(METAS)]


def metas(system: Machine) -> list[str]:
    """Packages that pull in the newer kernel."""
    newest = system.base.new_version
    return [n for n in _kernel_debs(system) if n.startswith(METAS) and f"_{newest}_" in n]


def driver_files(version: str) -> list[str]:
    return [f"{name}_{version}-1_amd64.deb" for name in DRIVER_PACKAGES]


def offer(system: Machine, *names: str) -> None:
    """What apt knows from now on."""
    publish(system.root, *names)
    system.apt("update")


def _kernel_debs(system: Machine) -> list[str]:
    return sorted(path.name for path in system.path(ARCHIVE).glob("linux-*.deb"))
