"""Has somebody else changed what depmod and the initramfs tools go by: cheap fingerprints."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from gpuguard.host import Host
from gpuguard.state import module_tree

_DEPMOD_READS = re.compile(r".+\.ko(\.(gz|xz|zst))?|modules\.(order|builtin|builtin\.modinfo)")
_CONFIGURATION = (
    "/etc/depmod.d", "/run/depmod.d", "/usr/local/lib/depmod.d", "/lib/depmod.d",
    "/usr/lib/depmod.d",
)  # fmt: skip
_PACKAGES = "/var/lib/dpkg/status"  # replaced by every apt and dpkg
_OF_A_KERNEL = ("kernel", "modules.order", "modules.builtin")


def depmod_inputs(host: Host, release: str) -> str:
    """Fingerprint of all files that depmod reads for a release: names, sizes, times."""
    digest = hashlib.sha256()
    folders = [module_tree(release), *_CONFIGURATION]
    for folder in folders:
        root = host.path(folder)
        for path in sorted(_files(root)):
            if folder in _CONFIGURATION or _DEPMOD_READS.fullmatch(path.name):
                digest.update(f"{path.relative_to(root)}\0{_stamp(path)}\n".encode())
    return digest.hexdigest()


def packages(host: Host) -> str:
    """Fingerprint of what is installed."""
    return _stamp(host.path(_PACKAGES))


def is_gone(host: Host, release: str) -> bool:
    """True if a kernel was purged; a purge leaves a folder with files that are not its own."""
    tree = host.path(module_tree(release))
    return not any((tree / name).exists() for name in _OF_A_KERNEL)


def _files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):  # no links followed: build and source are some
        for name in names:
            if not name.endswith(".gpuguard-new"):
                yield Path(folder, name)


def _stamp(path: Path) -> str:
    try:
        status = path.lstat()
    except OSError:
        return "nothing"
    if stat.S_ISLNK(status.st_mode):
        return f"link {path.readlink()}"
    return f"{status.st_size} {status.st_mtime_ns}"
