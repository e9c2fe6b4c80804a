"""Who changed a package: the last entry of apt's history, or of dpkg's log, that names it.

Evidence only. That a hold was lifted is in no log (apt-mark writes none); what was installed
since, and by which command, is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

from gpuguard.host import Host

_HISTORY = "/var/log/apt/history.log"
_DPKG_LOG = "/var/log/dpkg.log"
_MAX_BYTES = 512 << 10  # the end of it: logs are rotated each month, and busy ones are long
_ACTIONS = ("Install", "Upgrade", "Downgrade", "Reinstall", "Remove", "Purge")
_DPKG_LINE = re.compile(
    r"^(?P<when>\S+ \S+) (?P<what>install|upgrade|remove|purge) (?P<name>[^:\s]+):(?P<arch>\S+) "
    r"(?P<old>\S+) (?P<new>\S+)$",
    re.MULTILINE,
)


class Entry(NamedTuple):
    """One entry: when it ended (``2026-11-29 18:00:00``, local time in both logs), and in words."""

    until: str
    text: str


def probe_package_logs(
    host: Host, names: Iterable[str], since: Mapping[str, str] | None = None
) -> Mapping[str, str]:
    """Name -> one line; names of which no log that can be read says anything are left out.

    ``since`` (RFC 3339): what was before is no evidence, but how the package came here.

    What bypassed apt (``dpkg -i``) is in dpkg's log alone; what went through apt is in both, and
    apt's says by which command.
    """
    wanted = list(names)
    by_dpkg = parse_dpkg_log(_tail(host, _DPKG_LOG), wanted)
    after = {name: _local(moment) for name, moment in (since or {}).items()}
    by_apt = parse_history(_tail(host, _HISTORY), wanted)
    return {
        name: max(entries, key=lambda entry: entry.until).text
        for name in wanted
        if (
            entries := [
                log[name]
                for log in (by_apt, by_dpkg)
                if name in log and log[name].until >= after.get(name, "")
            ]
        )
    }


def parse_history(text: str, names: Iterable[str]) -> dict[str, Entry]:
    """``2026-11-29 18:00:00 Upgrade by: apt full-upgrade, user (1000)``, the last one of each."""
    found = {}
    blocks = [dict(_fields(block)) for block in text.split("\n\n")]
    for name in names:
        plain = re.escape(name.partition(":")[0])
        wanted = re.compile(rf"(?:^|, ){plain}(?::[a-z0-9-]+)? \(")
        for block in reversed(blocks):
            action = next((a for a in _ACTIONS if wanted.search(block.get(a, ""))), None)
            if action is not None:
                command = block.get("Commandline", "a program without a command line")
                who = f", {block['Requested-By']}" if "Requested-By" in block else ""
                when, until = (
                    " ".join(block.get(key, "").split()) for key in ("Start-Date", "End-Date")
                )
                found[name] = Entry(until or when, f"{when} {action} by: {command}{who}")
                break
    return found


def parse_dpkg_log(text: str, names: Iterable[str]) -> dict[str, Entry]:
    """``2026-11-29 18:00:00 upgrade 1 -> 2, dpkg``, the last one of each."""
    wanted = {name.partition(":")[0]: name for name in names}
    return {
        wanted[match["name"]]: Entry(
            match["when"], f"{match['when']} {match['what']} {match['old']} -> {match['new']}, dpkg"
        )
        for match in _DPKG_LINE.finditer(text)
        if match["name"] in wanted
    }


def _local(moment: str) -> str:
    """A moment as both logs have it."""
    with suppress(ValueError):
        return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return ""


def _fields(block: str) -> Iterable[tuple[str, str]]:
    for line in block.splitlines():
        key, colon, value = line.partition(": ")
        if colon:
            yield key, value


def _tail(host: Host, absolute: str) -> str:
    with suppress(OSError), host.path(absolute).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MAX_BYTES))
        return file.read(_MAX_BYTES).decode("utf-8", "replace")
    return ""
