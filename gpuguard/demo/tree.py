"""A small host tree: enough of a Debian or Ubuntu machine for every probe and for rebuilds.

Kernel headers, module trees, DKMS and GRUB's files are real in form and, where it matters,
in content; images cannot be booted, and ``/proc`` and ``/sys`` are plain files. The parts
compose: ``make_tree``, ``kernels.add_kernel``, ``dkms.dkms_install``, ``boot_into``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuguard.core.facts import MODULE_NAMES
from gpuguard.demo.bootloader import ROOT_UUID
from gpuguard.demo.driver import install_driver, note_compressed_modules
from gpuguard.demo.headers import HeadersCache
from gpuguard.demo.kernels import add_kernel
from gpuguard.demo.loaded import LoadedModule, loadable_modules
from gpuguard.demo.source import P2P_PATCH, VERSION, copy_standin
from gpuguard.state import CONFIG_FILE

#: The operator's source tree and patch in a demo tree; the configuration names them.
SOURCE_DIR = "/srv/nvidia/open-gpu-kernel-modules"
PATCH_FILE = "/srv/nvidia/patches/p2p.patch"
_PCI = "sys/bus/pci"
_RTX_5090 = "0x2b85"

_OS_RELEASE = {
    "debian": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nNAME="Debian GNU/Linux"\n'
    'VERSION_ID="12"\nVERSION="12 (bookworm)"\nVERSION_CODENAME=bookworm\nID=debian\n',
    "ubuntu": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\n'
    'VERSION="24.04.3 LTS (Noble Numbat)"\nVERSION_CODENAME=noble\nID=ubuntu\nID_LIKE=debian\n',
}


def make_tree(
    root: Path,
    headers: HeadersCache,
    *,
    releases: Sequence[str] | None = None,
    cards: int = 4,
    version: str = VERSION,
    suffix: str = "",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Make a host tree without NVIDIA modules, booted into the first of its kernels.

    Args:
        root: a folder that is not there yet or is empty.
        headers: where kernels come from.
        releases: kernels to install, in this order; default: all that ``headers`` names.
        cards: NVIDIA cards on the PCI bus.
        version: of the userland, of the operator's source tree.
        suffix: how the kernels' own modules are compressed.
        config: more keys for gpuguard.yaml.
    """
    kernels = tuple(headers.releases if releases is None else releases)
    root.mkdir(parents=True, exist_ok=True)
    _write(root, "etc/os-release", _OS_RELEASE[_distribution(kernels)])
    for folder in ("etc/depmod.d", "etc/modprobe.d", "tmp", "var/log"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for release in kernels:
        add_kernel(root, release, headers.root, suffix=suffix)
    install_driver(root, version)
    install_operator_source(root, version)
    write_config(root, config or {})
    add_cards(root, cards)
    if kernels:
        boot_into(root, kernels[0])
    return root


def install_operator_source(root: Path, version: str = VERSION) -> None:
    """What the operator keeps: the whole source tree, unpatched, and the patch."""
    source = root / SOURCE_DIR.lstrip("/")
    source.parent.mkdir(parents=True, exist_ok=True)
    copy_standin(source, version=version)
    patch = root / PATCH_FILE.lstrip("/")
    patch.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(P2P_PATCH, patch)


def write_config(root: Path, more: Mapping[str, Any]) -> None:
    """Write ``/etc/gpuguard/gpuguard.yaml`` for the operator's source; ``more`` adds keys."""
    import yaml

    content = {"source": {"path": SOURCE_DIR, "patches": [PATCH_FILE]}, **more}
    _write(root, CONFIG_FILE, yaml.safe_dump(content, sort_keys=False))


def add_cards(root: Path, count: int) -> None:
    """Put RTX 5090 cards on the PCI bus, each below a root port of its own, as sysfs shows it."""
    bus = root / _PCI / "devices"
    bus.mkdir(parents=True, exist_ok=True)
    (root / _PCI / "drivers" / "nvidia").mkdir(parents=True, exist_ok=True)
    for number in range(1, count + 1):
        address = f"0000:{number:02x}:00.0"
        device = f"sys/devices/pci0000:00/0000:00:{number:02x}.0/{address}"
        for name, value in (("vendor", "0x10de"), ("device", _RTX_5090), ("class", "0x030000")):
            _write(root, f"{device}/{name}", f"{value}\n")
        (bus / address).symlink_to(f"../../../../{device}")


def boot_into(root: Path, release: str) -> None:
    """Pretend that the machine was restarted with a kernel: it loads the modules it finds.

    ``/proc`` and ``/sys`` say afterwards what they would: which kernel runs, which modules
    are loaded (version, srcversion, build-id), which cards the driver holds. A module that was
    built for another kernel is not loaded.
    """
    _write(root, "proc/sys/kernel/osrelease", f"{release}\n")
    _write(
        root, "proc/cmdline", f"BOOT_IMAGE=/boot/vmlinuz-{release} root=UUID={ROOT_UUID} ro quiet\n"
    )
    for gone in ("sys/module", "proc/driver/nvidia"):
        shutil.rmtree(root / gone, ignore_errors=True)
    modules = loadable_modules(root, release)
    for name in MODULE_NAMES:
        if name in modules:
            _load(root, name, modules[name])
    _write_driver_version(root, modules.get("nvidia"))
    _bind_cards(root, bound="nvidia" in modules)
    note_compressed_modules(root)


def _load(root: Path, name: str, module: LoadedModule) -> None:
    folder = f"sys/module/{name.replace('-', '_')}"
    _write(root, f"{folder}/initstate", "live\n")
    _write(root, f"{folder}/refcnt", "0\n")
    _write(root, f"{folder}/version", f"{module.version}\n")
    _write(root, f"{folder}/srcversion", f"{module.srcversion}\n")
    note = root / folder / "notes" / ".note.gnu.build-id"
    note.parent.mkdir(parents=True)
    note.write_bytes(module.build_id_note)


def _write_driver_version(root: Path, module: LoadedModule | None) -> None:
    """As the open flavour of the driver prints it; recorded from driver 525 and 580."""
    if module is not None:
        _write(
            root,
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
            f"{module.version}  Release Build  (gpuguard@demo)\n"
            "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)\n",
        )


def _bind_cards(root: Path, *, bound: bool) -> None:
    for device in (root / _PCI / "devices").iterdir():
        link = device.resolve() / "driver"
        link.unlink(missing_ok=True)
        if bound:
            link.symlink_to("../../../../bus/pci/drivers/nvidia")


def _distribution(releases: Sequence[str]) -> str:
    return "ubuntu" if any(release.endswith("-generic") for release in releases) else "debian"


def _write(root: Path, path: str, text: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
