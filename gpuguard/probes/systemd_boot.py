"""What systemd-boot will start.

Sources: the Boot Loader Specification (entries, sort order), the Boot Loader Interface (EFI
variables), ``loader.conf(5)``. The order is that of systemd 250 and later.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from gpuguard.core.releases import release_key
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text, real_path
from gpuguard.probes.efivars import read_loader_variable
from gpuguard.probes.kernels import is_release, release_of_image, release_of_image_name
from gpuguard.probes.unified import read_section

#: The EFI system partition, and the extended boot partition beside it.
_FOLDERS = ("/efi", "/boot", "/boot/efi")
_COUNTER = re.compile(r"\+(\d+)(?:-\d+)?(?=\.\w+$)")


@dataclass(frozen=True, slots=True)
class LoaderEntry:
    """One boot entry; ``identifier`` is the file name without boot counter, in lower case."""

    identifier: str
    release: str | None
    version: str = ""
    sort_key: str = ""
    machine_id: str = ""
    is_exhausted: bool = False  # boot counting: no tries left
    is_unified: bool = False
    initrds: tuple[str, ...] = ()  # by path in the host
    command_line: str | None = None


def parse_pairs(text: str) -> dict[str, str]:
    """Keys and values of loader.conf and of an entry; a later line wins, ``#`` comments."""
    pairs = {}
    for line in text.splitlines():
        key, _, value = line.strip().partition(" ")
        if "\t" in key:
            key, _, value = line.strip().partition("\t")
        if key and not key.startswith("#"):
            pairs[key] = value.strip()
    return pairs


def sorted_entries(entries: Sequence[LoaderEntry]) -> list[LoaderEntry]:
    """In menu order: entries with a sort-key first, newest version first, failed ones last."""
    by_name = sorted(entries, key=lambda e: release_key(e.identifier), reverse=True)
    keyed = [entry for entry in by_name if entry.sort_key]
    keyed.sort(key=lambda e: release_key(e.version), reverse=True)
    keyed.sort(key=lambda e: (e.sort_key, e.machine_id))
    return sorted(
        [*keyed, *(entry for entry in by_name if not entry.sort_key)],
        key=lambda e: e.is_exhausted,
    )


def select_entry(entries: Sequence[LoaderEntry], patterns: Sequence[str]) -> LoaderEntry:
    """The entry that the first matching pattern names, else the first of the menu.

    Args:
        entries: all entries, in any order.
        patterns: one-shot entry, default set from the running system, default of loader.conf.

    Raises:
        ProbeError: it cannot be told.
    """
    ordered = sorted_entries(entries)
    for pattern in filter(None, patterns):
        if pattern.startswith("auto-"):
            raise ProbeError(f"the next boot goes to '{pattern}', which is not a Linux entry")
        wanted = pattern.lower().removesuffix(".conf").removesuffix(".efi")
        for entry in ordered:
            if fnmatchcase(entry.identifier.rpartition(".")[0], wanted) or fnmatchcase(
                entry.identifier, pattern.lower()
            ):
                return entry
    if len({entry.is_unified for entry in ordered}) > 1:
        raise ProbeError("unified kernel images lie beside entries, and no default is set")
    return ordered[0]


def next_entry(host: Host, installed: Sequence[str]) -> LoaderEntry | None:
    """What systemd-boot starts next; None if the host has no entries for it.

    Raises:
        ProbeError: there are entries, or may be, but the next one cannot be told.
    """
    entries = [e for folder in _FOLDERS for e in _entries_of(host, folder, installed)]
    if not entries:
        return None
    entry = select_entry(list({e.identifier: e for e in entries}.values()), _patterns(host))
    if entry.release is None:
        raise ProbeError(f"entry '{entry.identifier}' does not say which kernel it starts")
    return entry


def entry_identifier(host: Host, installed: Sequence[str], release: str) -> str | None:
    """The entry that starts a kernel, as ``default`` in loader.conf names it; None: there is none.

    Raises:
        ProbeError: the entries cannot be read.
    """
    entries = [e for folder in _FOLDERS for e in _entries_of(host, folder, installed)]
    ordered = sorted_entries(list({e.identifier: e for e in entries}.values()))
    return next((e.identifier for e in ordered if e.release == release), None)


def _patterns(host: Host) -> tuple[str, ...]:
    texts = (read_text(host, f"{folder}/loader/loader.conf") for folder in _FOLDERS)
    config = parse_pairs(next((text for text in texts if text is not None), ""))
    default = read_loader_variable(host, "LoaderEntryDefault") or config.get("default", "")
    if default == "@saved":
        default = read_loader_variable(host, "LoaderEntryLastBooted")
    return (read_loader_variable(host, "LoaderEntryOneShot"), default)


def _entries_of(host: Host, folder: str, installed: Sequence[str]) -> list[LoaderEntry]:
    entries = []
    for name in list_dir(host, f"{folder}/loader/entries"):
        if name.endswith(".conf") and not name.startswith((".", "auto-")):
            text = read_text(host, f"{folder}/loader/entries/{name}") or ""
            pairs = parse_pairs(text)
            image = real_path(host, f"{folder}/{pairs.get('linux', '').lstrip('/')}")
            if "linux" in pairs and image is not None:  # the loader skips it without an image
                release = _release_of(pairs, release_of_image(image))
                initrds = tuple(f"{folder}/{v.lstrip('/')}" for v in _values(text, "initrd"))
                entry = _entry(name, release, pairs)
                options = " ".join(_values(text, "options"))
                entries.append(replace(entry, initrds=initrds, command_line=options))
    images = f"{folder}/EFI/Linux"
    names = (name for name in list_dir(host, images) if name.endswith(".efi"))
    return [*entries, *(_unified(host, images, name, installed) for name in names)]


def _values(text: str, key: str) -> list[str]:
    """Every value of a key that may come several times."""
    pairs = (parse_pairs(line) for line in text.splitlines())
    return [pair[key] for pair in pairs if key in pair]


def _unified(host: Host, folder: str, name: str, installed: Sequence[str]) -> LoaderEntry:
    path = f"{folder}/{name}"
    named = next((r for r in reversed(installed) if r in name), None)
    try:
        stated, line = (read_section(host, path, part) for part in (".uname", ".cmdline"))
    except ProbeError:  # whoever looks for its initrd says why
        stated = line = None
    entry = _entry(name, stated if stated and is_release(stated) else named, {}, is_unified=True)
    return replace(entry, initrds=(path,), command_line=line)


def _entry(
    name: str, release: str | None, pairs: dict[str, str], *, is_unified: bool = False
) -> LoaderEntry:
    counter = _COUNTER.search(name)
    return LoaderEntry(
        identifier=_COUNTER.sub("", name).lower(),
        release=release,
        version=pairs.get("version", ""),
        sort_key=pairs.get("sort-key", ""),
        machine_id=pairs.get("machine-id", "").lower(),
        is_exhausted=counter is not None and int(counter[1]) == 0,
        is_unified=is_unified,
    )


def _release_of(pairs: dict[str, str], in_image: str | None) -> str | None:
    # kernel-install(8) writes /<machine id>/<release>/linux; kernelstub of Pop!_OS
    # /EFI/Pop_OS-<uuid>/vmlinuz.efi, where the image alone tells.
    *_, parent, name = ["", *pairs["linux"].split("/")]
    candidates = (in_image, release_of_image_name(name), parent, pairs.get("version", ""))
    return next((c for c in candidates if c and is_release(c)), None)
