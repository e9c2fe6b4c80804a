"""A cheap look at everything that ``status`` depends on: has anything changed since the last one.

Names, sizes, times and inodes, and the few small files of /proc and /sys whose times mean
nothing. What it does not see (firmware variables, a module copied deep into a kernel's own tree
without depmod) is found by the full look that comes now and then all the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpuguard.core.facts import MODULE_NAMES
from gpuguard.host.port import Host
from gpuguard.probes.modules_config import DEPMOD_DIRS, MODPROBE_DIRS
from gpuguard.state import BACKUPS_DIR, RUN_DIR, STATE_DIR

_DEPTH = 4
_ENTRIES = 4000  # of one tree: a watcher must not become the load
#: GRUB's own modules, fonts and texts: hundreds of files that decide nothing.
_SKIPPED = frozenset({"i386-pc", "x86_64-efi", "arm64-efi", "fonts", "locale", "themes", "unicode"})
#: Locks, and who asks the driver just now: made by looking.
_OURS = frozenset({"lock", "probe.lock", "probe-outstanding.json"})
_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu/nvidia/current", "/usr/lib/aarch64-linux-gnu/nvidia/current",
)  # fmt: skip
_SINGLE = (
    "/vmlinuz", "/initrd.img", "/usr/src", "/etc/dkms/framework.conf", "/etc/kernel/cmdline",
    "/var/lib/dpkg/status", "/var/lib/apt/lists", "/proc/sys/kernel/osrelease",
    "/proc/driver/nvidia", "/sys/bus/pci/devices", *_LIBRARIES,
)  # fmt: skip
_READ = (
    "/proc/sys/kernel/osrelease", "/proc/driver/nvidia/version",
    "/sys/module/nvidia/notes/.note.gnu.build-id", "/sys/module/nvidia/version",
)  # fmt: skip
_MAX_READ = 4096


def fingerprint(host: Host, *files: str) -> str:
    """Changes when something changes; ``files`` are further paths inside the host to look at."""
    digest = hashlib.sha256()
    for line in _lines(host, files):
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def _lines(host: Host, files: tuple[str, ...]) -> Iterator[str]:
    for absolute in (*_SINGLE, *files):
        yield _stated(host.path(absolute))
    for absolute in _READ:
        yield f"{absolute} {_content(host.path(absolute))!r}"
    for absolute in ("/boot", "/efi/loader", STATE_DIR, RUN_DIR):
        yield from _tree(host.path(absolute), _DEPTH, skip=host.path(f"{BACKUPS_DIR}/objects"))
    for absolute in (*DEPMOD_DIRS, *MODPROBE_DIRS):
        yield from _tree(host.path(absolute), 1)
    yield from _module_trees(host)
    for device in _names(host.path("/sys/bus/pci/devices")):
        yield f"{device} {_link(host.path(f'/sys/bus/pci/devices/{device}') / 'driver')}"
    for name in MODULE_NAMES:
        yield str(host.path(f"/sys/module/{name.replace('-', '_')}").exists())


def _module_trees(host: Host) -> Iterator[str]:
    for root in ("/lib/modules", "/usr/lib/modules"):
        top = host.path(root)
        for release in _names(top):
            yield _stated(top / release)
            yield f"{release} {_link(top / release / 'build')}"
            build = host.path(f"{root}/{release}/build")
            for file in (top / release / "modules.dep.bin", build / ".config",
                         build / "Module.symvers", build):  # fmt: skip
                yield _stated(file)
            yield from _tree(top / release / "updates", _DEPTH)


def _tree(top: Path, depth: int, *, skip: Path | None = None) -> Iterator[str]:
    todo, seen = [(str(top), depth)], 0
    while todo:
        folder, left = todo.pop()
        entries: list[os.DirEntry[str]] = []
        with suppress(OSError), os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name in _OURS:
                continue
            seen += 1
            if seen > _ENTRIES:
                return
            with suppress(OSError):
                state = entry.stat(follow_symlinks=False)
                yield f"{entry.path} {state.st_size} {state.st_mtime_ns} {state.st_ino}"
                is_folder = left > 1 and entry.is_dir(follow_symlinks=False)
                if is_folder and entry.name not in _SKIPPED and entry.path != str(skip):
                    todo.append((entry.path, left - 1))


def _stated(path: Path) -> str:
    try:
        state = path.stat()
    except OSError as error:
        return f"{path} {error.errno}"
    if str(path).startswith("/proc/"):
        return str(path)  # there; its times mean nothing
    return f"{path} {state.st_size} {state.st_mtime_ns} {state.st_ino}"


def _content(path: Path) -> bytes | None:
    with suppress(OSError), path.open("rb") as file:
        return file.read(_MAX_READ)
    return None


def _names(folder: Path) -> list[str]:
    with suppress(OSError):
        return sorted(os.listdir(folder))  # noqa: PTH208 - names alone, and it is called often
    return []


def _link(path: Path) -> str:
    with suppress(OSError):
        return os.readlink(path)  # noqa: PTH115 - as above
    return ""
