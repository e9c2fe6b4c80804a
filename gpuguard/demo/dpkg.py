"""The package database of a demo tree: just enough for ``dpkg-query --admindir``."""

from __future__ import annotations

from pathlib import Path

from gpuguard.core.releases import flavour
from gpuguard.demo.bootloader import installed_releases
from gpuguard.demo.headers import package_version
from gpuguard.demo.source import VERSION

_DATABASE = "var/lib/dpkg"


def write_dpkg_status(root: Path, headers: Path | None = None) -> None:
    """Write ``/var/lib/dpkg/status`` from the kernels that the tree has.

    Selections that were changed since (``hold``) are kept, and so are versions that
    ``headers``, the cache they came from, does not name.
    """
    database = root / _DATABASE
    for folder in ("info", "updates"):
        (database / folder).mkdir(parents=True, exist_ok=True)
    (database / "available").touch()
    status = database / "status"
    before = _parse(status.read_text()) if status.exists() else {}
    packages = dict(_packages(root, headers, before))
    status.write_text("\n".join(_stanza(*item, before) for item in sorted(packages.items())))


def _packages(
    root: Path, headers: Path | None, before: dict[str, dict[str, str]]
) -> list[tuple[str, str]]:
    found = [(f"{name}", f"{VERSION}-1") for name in ("libnvidia-ml1", "nvidia-open-kernel-dkms")]
    newest = ""
    for release in installed_releases(root):
        package = f"linux-headers-{release}"
        version = package_version(headers, package) if headers else None
        newest = version or before.get(package, {}).get("Version") or "1"
        found += [(package, newest), (f"linux-image-{release}", newest)]
        meta = flavour(release)
    if newest:
        found += [(f"linux-headers-{meta}", newest), (f"linux-image-{meta}", newest)]
    return found


def _stanza(package: str, version: str, before: dict[str, dict[str, str]]) -> str:
    status = before.get(package, {}).get("Status", "install ok installed")
    return (
        f"Package: {package}\nStatus: {status}\nPriority: optional\nSection: kernel\n"
        f"Maintainer: gpuguard demo <demo@localhost>\nArchitecture: amd64\nVersion: {version}\n"
        f"Description: placeholder in a tree made by gpuguard demo\n"
    )


def _parse(text: str) -> dict[str, dict[str, str]]:
    stanzas = (
        dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line)
        for stanza in text.split("\n\n")
    )
    return {fields["Package"]: fields for fields in stanzas if "Package" in fields}
