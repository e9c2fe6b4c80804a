"""Configured options of the nvidia module: modprobe.d and the kernel's command line.

Order and grammar as modprobe.d(5): a file of an earlier folder hides one of the same name in
a later one; files are read by name; ``#`` starts a comment, a backslash joins lines.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from gpuguard.core.doctor_facts import ModuleOption, Unread
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text
from gpuguard.probes.modules import canonical_name
from gpuguard.probes.modules_config import MODPROBE_DIRS

_PREFIX = "NVreg_"
_CMDLINE = "/proc/cmdline"


def probe_options(host: Host) -> tuple[ModuleOption, ...] | Unread:
    """Every ``NVreg_`` option in the order in which it takes effect; the last of a name wins."""
    try:
        found = [option for path in _files(host) for option in _of_file(host, path)]
        found += _of_cmdline(read_text(host, _CMDLINE) or "")
    except ProbeError as error:
        return Unread("/etc/modprobe.d", error.message)
    return tuple(found)


def module_arguments(host: Host, module: str) -> tuple[str, ...]:
    """``name=value`` words that modprobe would give one module, for those who use insmod.

    Raises:
        ProbeError: a configuration file cannot be read.
    """
    texts = (read_text(host, path) or "" for path in _files(host))
    return tuple(
        word
        for text in texts
        for name, words in _option_lines(text)
        if canonical_name(f"{name}.ko") == module
        for word in words
    )


def probe_blacklisted(host: Host) -> tuple[tuple[str, str], ...]:
    """(module, file) of each ``blacklist`` line about the core module or unified memory.

    Such a module is not loaded through an alias, that is, because there is a card.

    Raises:
        ProbeError: a configuration file cannot be read.
    """
    return tuple(
        (words[1], path)
        for path in _files(host)
        for line in (read_text(host, path) or "").splitlines()
        if len(words := _split(line)) > 1 and words[0] == "blacklist"
        if canonical_name(f"{words[1]}.ko") in ("nvidia", "nvidia-uvm")
    )


def parse_options(text: str, source: str) -> Iterator[ModuleOption]:
    """``options nvidia NVreg_A=1 NVreg_B="x=1;y=2"``, also for ``nvidia-current*``."""
    for module, words in _option_lines(text):
        if is_nvidia(module):
            yield from _options(words, source)


def _option_lines(text: str) -> Iterator[tuple[str, list[str]]]:
    for line in text.replace("\\\n", " ").splitlines():
        words = _split(line)
        if len(words) > 2 and words[0] == "options":  # noqa: PLR2004
            yield words[1], words[2:]


def is_nvidia(module: str) -> bool:
    """True for the core module under any name that distributions give it."""
    return canonical_name(f"{module}.ko") == "nvidia"


def _files(host: Host) -> list[str]:
    by_name: dict[str, str] = {}
    for folder in MODPROBE_DIRS:
        for name in list_dir(host, folder):
            if name.endswith(".conf"):
                by_name.setdefault(name, f"{folder}/{name}")
    return [by_name[name] for name in sorted(by_name)]


def _of_file(host: Host, path: str) -> Iterator[ModuleOption]:
    yield from parse_options(read_text(host, path) or "", path)


def _of_cmdline(text: str) -> list[ModuleOption]:
    words = []
    for word in _split(text):
        module, dot, option = word.partition(".")
        if dot and is_nvidia(module):
            words.append(option)
    return list(_options(words, _CMDLINE))


def _options(words: list[str], source: str) -> Iterator[ModuleOption]:
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith(_PREFIX):
            yield ModuleOption(name.removeprefix(_PREFIX), value, source)


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an open quotation mark
        return line.split()
