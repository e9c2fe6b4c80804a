"""NVIDIA driver versions side by side: userland libraries, loaded module.

Every version is the full one. NVML's own mismatch message shows two numbers only, so that
570.124.04 and 570.124.06 look equal in it (CASES C34).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gpuguard.core.facts import DriverFacts
from gpuguard.core.packages import Package
from gpuguard.errors import ProbeError
from gpuguard.host.elf import parse_build_id_note
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_bytes, read_text, real_path
from gpuguard.probes.dpkg import read_packages

_VERSION = r"\d{2,}\.\d+(?:\.\d+)?"
_FULL_VERSION = re.compile(_VERSION)
_LIBRARY = re.compile(rf"libnvidia-ml\.so\.({_VERSION})")
_SONAME = "libnvidia-ml.so.1"
_TRIPLETS = ("x86_64-linux-gnu", "aarch64-linux-gnu")  # no 32-bit: those only follow the others
_FOLDERS = (
    *(f"/usr/lib/{triplet}{below}" for triplet in _TRIPLETS for below in ("", "/nvidia/current")),
    "/usr/lib64",
    "/usr/lib",
)
#: Debian, then Ubuntu; from branch 590 on Ubuntu's names carry no number (CASES C36).
_PACKAGE = re.compile(
    r"(?:libnvidia-ml1|libnvidia-compute|nvidia-utils)(?:-\d+)?(?:-server|-open)*"
)
#: ``NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (…)``
_NVRM = re.compile(
    rf"^NVRM version:.*?\b(?P<open>Open )?Kernel Module\b.*?\s(?P<version>{_VERSION})(?:\s|$)",
    re.MULTILINE,
)


def probe_driver(host: Host, packages: Mapping[str, Package] | None = None) -> DriverFacts:
    """Versions of what is installed and of what is loaded.

    Args:
        host: where to look.
        packages: of ``read_packages``; None reads it here if it is needed.

    Raises:
        ProbeError: a place that would tell cannot be read.
    """
    userland, source = _userland(host, packages)
    loaded, flavour = _loaded(host)
    return DriverFacts(
        userland=userland,
        userland_source=source,
        loaded=loaded,
        loaded_build_id=_loaded_build_id(host),
        flavour=flavour,
    )


def library_folders(host: Host) -> tuple[str, ...]:
    """Folders inside the host that hold ``libnvidia-ml.so.1``."""
    return tuple(f for f in _FOLDERS if real_path(host, f"{f}/{_SONAME}") is not None)


def parse_driver_version(text: str) -> tuple[str | None, str | None]:
    """(version, "open" or "proprietary") of ``/proc/driver/nvidia/version``, else None twice."""
    match = _NVRM.search(text)
    if match is None:
        return None, None
    return match["version"], "open" if match["open"] else "proprietary"


def parse_package_version(version: str) -> str | None:
    """``535.261.03`` of ``1:535.261.03-1~deb12u1``; None if it is no driver version."""
    upstream = version.rpartition(":")[2].partition("-")[0]
    match = _FULL_VERSION.match(upstream)
    return match[0] if match else None


def _userland(host: Host, packages: Mapping[str, Package] | None) -> tuple[str | None, str]:
    for folder in _FOLDERS:
        real = real_path(host, f"{folder}/{_SONAME}")
        if real is not None and (match := _LIBRARY.fullmatch(real.name)):
            return match[1], host.inside(real)
    lying = dict(_versioned_files(host))  # without the link: ldconfig has not run
    if len(lying) == 1:
        return next(iter(lying.items()))
    known = read_packages(host) if packages is None else packages
    for name, package in sorted(known.items()):
        if package.is_installed and _PACKAGE.fullmatch(name):
            version = parse_package_version(package.version)
            if version is not None:
                return version, f"package {name} {package.version}"
    return None, ""


def _versioned_files(host: Host) -> Iterator[tuple[str, str]]:
    for folder in _FOLDERS:
        for name in list_dir(host, folder):
            if match := _LIBRARY.fullmatch(name):
                yield match[1], f"{folder}/{name}"


def _loaded(host: Host) -> tuple[str | None, str | None]:
    text = read_text(host, "/proc/driver/nvidia/version")
    version, flavour = parse_driver_version(text or "")
    if version is None:
        stated = (read_text(host, "/sys/module/nvidia/version") or "").strip()
        version = stated if _FULL_VERSION.fullmatch(stated) else None
    return version, flavour


def _loaded_build_id(host: Host) -> str | None:
    """Build-id of the loaded module; None if none is loaded or it cannot be read."""
    try:
        note = read_bytes(host, "/sys/module/nvidia/notes/.note.gnu.build-id")
    except ProbeError:
        return None
    return parse_build_id_note(note) if note else None
