"""The demo kit: the real dkms on a tree, and the simulated driver that answers from its files.

Out of scope: what gpuguard itself makes of such a tree.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuguard.core.facts import MODULE_NAMES
from gpuguard.demo import dkms
from gpuguard.demo.driver import LIBRARY_DIR, install_driver, note_compressed_modules
from gpuguard.demo.headers import HeadersCache
from gpuguard.demo.kernels import run_depmod
from gpuguard.demo.source import VERSION
from gpuguard.demo.tree import add_cards, boot_into
from gpuguard.errors import CommandError, PreflightError
from gpuguard.host import LocalHost
from tests import live
from tests.kit import HostTree, install_patched, modinfo, stock_module

PatchedModules = Callable[[str], Path]
CNS, OK = 1, 0
DRIVER_NOT_LOADED, VERSION_MISMATCH = 9, 18

_ASK = """
import json, pynvml
pynvml.nvmlInit()
cards = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
text = lambda value: value.decode() if isinstance(value, bytes) else value
print(json.dumps({
    "version": text(pynvml.nvmlSystemGetDriverVersion()),
    "names": [text(pynvml.nvmlDeviceGetName(card)) for card in cards],
    "uuids": [text(pynvml.nvmlDeviceGetUUID(card)) for card in cards],
    "bus_ids": [text(pynvml.nvmlDeviceGetPciInfo(card).busId) for card in cards],
    "p2p": [pynvml.nvmlDeviceGetP2PStatus(a, b, kind)
            for kind in (0, 1) for a in cards for b in cards if a is not b],
}))
"""


def ask(root: Path) -> dict[str, Any]:
    """What NVML's Python binding hears from the tree's driver; a child asks, as libraries stay."""
    done = _python(root, _ASK)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def init_error(root: Path) -> int:
    """The status of a failing nvmlInit."""
    code = "import pynvml\ntry: pynvml.nvmlInit()\nexcept pynvml.NVMLError as e: print(e.value)"
    return int(_python(root, code).stdout)


def _python(root: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(root / LIBRARY_DIR)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=False
    )


# --- dkms -----------------------------------------------------------------------------------


def test_dkms_builds_signs_and_installs_stock_in_the_tree_alone(
    host_tree: HostTree, kernel_headers: HeadersCache
) -> None:
    machine = ("/var/lib/dkms", "/etc/dkms", "/lib/modules", "/etc/depmod.d", "/usr/src")
    before = live.snapshot(machine)
    root = host_tree(kernels=1, stock=False)
    (release,) = kernel_headers.releases[:1]
    dkms.install_stock_source(root)
    dkms.dkms_add(root)
    assert dkms.dkms_status(root) == f"nvidia/{VERSION}: added\n"
    dkms.dkms_install(root, release)
    assert f"nvidia/{VERSION}, {release}, x86_64: installed" in dkms.dkms_status(root)
    for name in MODULE_NAMES:
        module = stock_module(root, release, name)
        assert modinfo(module, "vermagic").split()[0] == release
        assert modinfo(module, "signer") == "DKMS module signing key"
    dependencies = (root / "lib/modules" / release / "modules.dep").read_text()
    assert "updates/dkms/nvidia-modeset.ko: updates/dkms/nvidia.ko" in dependencies
    assert (root / "var/lib/dkms/mok.key").exists()
    assert live.differences(before, live.snapshot(machine)) == []


def test_a_failing_dkms_build_shows_the_end_of_its_log(
    host_tree: HostTree, kernel_headers: HeadersCache
) -> None:
    root = host_tree()
    release = kernel_headers.releases[1]
    dkms.dkms_remove(root, release)
    broken = root / "usr/src" / f"nvidia-{VERSION}" / "nvidia/nv-pci.c"
    broken.write_text(broken.read_text().replace("pci_get_device(", "pci_get_device_moved("))
    with pytest.raises(CommandError) as raised:
        dkms.dkms_install(root, release)
    assert "pci_get_device_moved" in raised.value.detail


def test_dkms_itself_says_that_headers_are_missing(
    host_tree: HostTree, kernel_headers: HeadersCache
) -> None:
    root = host_tree()
    release = kernel_headers.releases[1]
    dkms.dkms_remove(root, release)
    shutil.rmtree(root / "usr/src" / f"linux-headers-{release}")
    with pytest.raises(CommandError) as raised:
        dkms.dkms_install(root, release)
    assert "kernel headers" in raised.value.detail


def test_dkms_is_not_run_where_the_machine_overrides_the_package(tmp_path: Path) -> None:
    (tmp_path / "nvidia.conf").touch()
    with pytest.raises(PreflightError, match=r"nvidia\.conf"):
        dkms.refuse_overrides(tmp_path)


# --- the simulated driver -------------------------------------------------------------------


def test_driver_answers_by_the_module_that_would_be_loaded(
    host_tree: HostTree, kernel_headers: HeadersCache, patched_modules: PatchedModules
) -> None:
    old, new = kernel_headers.releases
    root = host_tree()
    answer = ask(root)
    assert answer["version"] == VERSION
    assert answer["names"] == ["NVIDIA GeForce RTX 5090 (simulated)"] * 4
    assert answer["bus_ids"] == [f"00000000:0{bus}:00.0".upper() for bus in (1, 2, 3, 4)]
    assert answer["p2p"] == [CNS] * 24

    install_patched(root, old, patched_modules(old))
    assert ask(root)["p2p"] == [OK] * 24

    boot_into(root, new)  # the incident: the new kernel has stock modules
    assert ask(root)["p2p"] == [CNS] * 24


def test_loaded_identity_is_the_resolved_modules(
    host_tree: HostTree, kernel_headers: HeadersCache, patched_modules: PatchedModules
) -> None:
    old = kernel_headers.releases[0]
    root = host_tree()
    note = root / "sys/module/nvidia/notes/.note.gnu.build-id"
    stock = note.read_bytes()
    assert len(stock) == 36
    assert stock in stock_module(root, old).read_bytes()
    install_patched(root, old, patched_modules(old))
    boot_into(root, old)
    assert note.read_bytes() != stock
    assert note.read_bytes() in (patched_modules(old) / "nvidia.ko").read_bytes()
    assert (root / "sys/module/nvidia_drm/version").read_text() == f"{VERSION}\n"
    assert (
        f"Open Kernel Module for x86_64  {VERSION}"
        in (root / "proc/driver/nvidia/version").read_text()
    )


def test_cards_keep_their_uuids(host_tree: HostTree) -> None:
    root = host_tree()
    uuids = ask(root)["uuids"]
    assert len(set(uuids)) == 4
    assert all(
        re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", str(u)) for u in uuids
    )
    shutil.rmtree(root / "sys/bus/pci/devices")
    shutil.rmtree(root / "sys/devices/pci0000:00")
    add_cards(root, 2)
    assert ask(root)["uuids"] == uuids[:2]


def test_no_module_no_driver(host_tree: HostTree) -> None:
    assert init_error(host_tree(stock=False)) == DRIVER_NOT_LOADED


def test_module_of_another_kernel_is_not_loaded(
    host_tree: HostTree, kernel_headers: HeadersCache
) -> None:
    old, new = kernel_headers.releases
    root = host_tree()
    shutil.copyfile(stock_module(root, new), stock_module(root, old))
    assert init_error(root) == DRIVER_NOT_LOADED
    boot_into(root, old)
    assert not (root / "sys/module/nvidia").exists()
    assert not (root / "proc/driver/nvidia/version").exists()


def test_userland_of_another_version_is_refused(host_tree: HostTree) -> None:
    root = host_tree()
    install_driver(root, "999.10.02")
    assert init_error(root) == VERSION_MISMATCH


def test_compressed_module_is_known_by_a_note(
    host_tree: HostTree, kernel_headers: HeadersCache
) -> None:
    root = host_tree()
    release = kernel_headers.releases[0]
    module = stock_module(root, release)
    LocalHost().run("xz", "--check=crc32", str(module), timeout=60)
    run_depmod(root, release)
    assert init_error(root) == DRIVER_NOT_LOADED
    note_compressed_modules(root)
    assert ask(root)["p2p"] == [CNS] * 24
    module.with_name("nvidia.ko.xz").write_bytes(b"other")
    assert init_error(root) == DRIVER_NOT_LOADED
