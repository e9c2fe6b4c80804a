"""Our own setting of the boot default, and what to call a kernel's entry in the menu.

GRUB: a file in ``/etc/default/grub.d``, which ``grub-mkconfig`` of Debian and Ubuntu reads after
``/etc/default/grub``. systemd-boot: a line in its ``loader.conf``, with what was there kept in a
comment above it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpuguard.core.facts import BootPin
from gpuguard.host import Host
from gpuguard.host.reading import read_text
from gpuguard.probes.bootloader import release_of_kernel
from gpuguard.probes.grub import Entry, parse_grub_config
from gpuguard.probes.systemd_boot import entry_identifier

GRUB_FILE = "/etc/default/grub.d/zz-gpuguard.cfg"
LOADER_FILES = tuple(f"{folder}/loader/loader.conf" for folder in ("/efi", "/boot", "/boot/efi"))
_MARK = re.compile(r"^# gpuguard keeps (?P<release>\S+) the boot default: (?P<why>.*)$", re.M)
_WAS = "# gpuguard: it was: "


def mark(release: str, why: str) -> str:
    """The line by which we know our own setting again."""
    return f"# gpuguard keeps {release} the boot default: {' '.join(why.split())}"


def probe_boot_pin(host: Host) -> BootPin | None:
    """What we have set, if anything.

    Raises:
        ProbeError: a file is there and cannot be read.
    """
    for loader, path in (("grub", GRUB_FILE), *(("systemd-boot", p) for p in LOADER_FILES)):
        match = _MARK.search(read_text(host, path) or "")
        if match is not None:
            return BootPin(release=match["release"], loader=loader, path=path, why=match["why"])
    return None


def grub_entry(host: Host, menu: str, release: str) -> str | None:
    """What ``GRUB_DEFAULT`` must be for a kernel: ids of its submenu and entry, as they are now.

    Raises:
        ProbeError: the menu cannot be read.
    """
    folder = menu.rpartition("/")[0]
    text = read_text(host, menu) or ""
    found = parse_grub_config(text, lambda path: read_text(host, path), folder=folder)
    paths = [
        path
        for path, entry in _entries(found.entries, ())
        if entry.kernel and release_of_kernel(host, entry.kernel) == release
    ]
    # not the recovery mode, and not the first entry of all, which is another kernel tomorrow
    paths.sort(key=lambda path: ("recovery" in path[-1], "simple" in path[-1]))
    return ">".join(part.replace(">", ">>") for part in paths[0]) if paths else None


def loader_entry(host: Host, installed: Sequence[str], release: str) -> str | None:
    """What ``default`` in loader.conf must be for a kernel.

    Raises:
        ProbeError: the entries cannot be read.
    """
    return entry_identifier(host, installed, release)


def pinned_loader(text: str, entry: str, release: str, why: str) -> str:
    """A loader.conf with our default in it, in the place of an earlier one of ours or another's."""
    lines = unpinned_loader(text).splitlines()
    defaults = [i for i, line in enumerate(lines) if line.split(maxsplit=1)[:1] == ["default"]]
    at = defaults[-1] if defaults else len(lines)  # the last one counts
    was = lines[at] if defaults else ""
    ours = [mark(release, why), f"{_WAS}{was}", f"default {entry}"]
    return "".join(f"{line}\n" for line in (*lines[:at], *ours, *lines[at + 1 :]))


def unpinned_loader(text: str) -> str:
    """The loader.conf as it was without us."""
    lines = text.splitlines()
    at = next((i for i, line in enumerate(lines) if _MARK.match(line)), None)
    if at is None:
        return text
    rest = lines[at + 1 :]
    was = rest[0].removeprefix(_WAS) if rest and rest[0].startswith(_WAS) else ""
    kept = [*lines[:at], *([was] if was else []), *rest[2:]]
    return "".join(f"{line}\n" for line in kept)


def _entries(
    entries: Sequence[Entry], above: tuple[str, ...]
) -> list[tuple[tuple[str, ...], Entry]]:
    found = []
    for entry in entries:
        path = (*above, entry.identifier or entry.title)
        if entry.children is not None:
            found += _entries(entry.children, path)
        else:
            found.append((path, entry))
    return found
