"""Upgrades that holds keep away: from the lists that apt has already fetched, without a network.

One call of ``apt-cache policy`` for all names. It shows every version and where it comes from, so
a security fix is seen also where a newer ordinary version is the candidate; a simulated upgrade
would show the candidate only, and takes the resolver's time.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from gpuguard.core.holds import Withheld
from gpuguard.core.packages import Package
from gpuguard.errors import CommandError, ProbeError
from gpuguard.host import Host
from gpuguard.host.reading import list_dir, read_text

_SECONDS = 60.0
_LISTS_DIRS = ("/var/lib/apt/lists", "/var/lib/apt/lists/partial")
_NO_LIST = ("auxfiles", "lock", "partial")  # what else lies in apt's folder of lists
_ARCHITECTURES = "/var/lib/dpkg/arch"
# bookworm-security, noble-security; buster/updates before Debian 11; any suite of that mirror
_SECURITY = re.compile(r"[a-z]-security/|/updates/|/debian-security ")
_VERSION = re.compile(r"^ (?P<here>\*\*\*|   ) (?P<version>\S+) -?\d+(?: \(.*\))?$")
_ORIGIN = re.compile(r"^ {7,12}-?\d+ (?P<origin>\S+ \S+.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One package in ``apt-cache policy``; ``newer``: versions above the installed one.

    ``newer`` has (version, does it come from a security archive), newest first.
    """

    name: str
    installed: str | None
    candidate: str | None
    newer: tuple[tuple[str, bool], ...] = ()


def probe_withheld(host: Host, packages: Mapping[str, Package]) -> tuple[Withheld, ...]:
    """Pending upgrades of the packages on hold, sorted by name.

    Raises:
        ProbeError: apt cannot be asked, or does not know of what it was asked.
    """
    held = sorted(name for name, p in packages.items() if p.is_held and not p.is_gone)
    if not held:
        return ()
    if not has_lists(host):
        raise ProbeError(
            "apt has fetched no lists of packages", hint="fetch them with: sudo apt-get update"
        )
    known = {found.name: found for found in parse_policy(_ask(host, held, packages))}
    if lost := [name for name in held if name not in known]:
        raise ProbeError(f"apt-cache policy says nothing of {', '.join(lost)}")
    return tuple(
        Withheld(
            name=name,
            installed=found.installed,
            candidate=found.candidate,
            security=any(is_security for _, is_security in _up_to_candidate(found)),
        )
        for name in held
        if (found := known[name]).installed and found.candidate
        if found.candidate in dict(found.newer)
    )


def parse_policy(text: str) -> Iterator[Known]:
    """What ``apt-cache policy NAME…`` prints (apt 2.6, 3.0), newest version first."""
    for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        name, _, rest = block.partition("\n")
        if not name.endswith(":"):
            continue  # "N: Unable to locate package …"
        fields = dict(re.findall(r"^  (Installed|Candidate): (\S+)", rest, re.MULTILINE))
        yield Known(
            name=name[:-1],
            installed=_word(fields.get("Installed")),
            candidate=_word(fields.get("Candidate")),
            newer=tuple(_newer(rest.splitlines())),
        )


def lists_updated(host: Host) -> str | None:
    """When apt's lists were fetched last (RFC 3339); None: never, or not to be seen."""
    times = []
    for folder in _LISTS_DIRS if has_lists(host) else ():
        try:
            times.append(host.path(folder).stat().st_mtime)
        except OSError:
            continue
    if not times:
        return None
    return datetime.fromtimestamp(max(times), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def has_lists(host: Host) -> bool:
    """True if apt has fetched lists of packages; without any it knows of nothing new."""
    return any(name not in _NO_LIST for name in list_dir(host, _LISTS_DIRS[0]))


def _newer(lines: Sequence[str]) -> Iterator[tuple[str, bool]]:
    version, is_security = None, False
    for line in lines:
        if match := _VERSION.match(line):
            if version is not None:
                yield version, is_security
            if match["here"] == "***":
                return
            version, is_security = match["version"], False
        elif version is not None and (match := _ORIGIN.match(line)):
            is_security = is_security or _SECURITY.search(f"{match['origin']} ") is not None
    if version is not None:
        yield version, is_security


def _up_to_candidate(known: Known) -> Iterator[tuple[str, bool]]:
    below = False
    for version, is_security in known.newer:
        below = below or version == known.candidate
        if below:
            yield version, is_security


def _word(text: str | None) -> str | None:
    return None if text in (None, "(none)") else text


def _ask(host: Host, names: Sequence[str], packages: Mapping[str, Package]) -> str:
    with _configuration_file() as file:
        env = {}
        if not host.is_live:
            file.write(_tree_configuration(host, packages))
            file.flush()
            Path(file.name).chmod(0o644)  # apt drops to an account of its own
            env["APT_CONFIG"] = file.name
        try:
            done = host.run("apt-cache", "policy", *names, timeout=_SECONDS, env=env)
        except CommandError as error:
            raise ProbeError(
                f"apt's lists cannot be looked at: {error.message}", hint=error.hint
            ) from error
    return done.stdout


@contextmanager
def _configuration_file() -> Iterator[IO[str]]:
    try:
        with tempfile.NamedTemporaryFile("w", prefix="gpuguard-apt-", suffix=".conf") as file:
            yield file
    except OSError as error:
        raise ProbeError(
            f"no temporary file can be made: {error.strerror}", hint="make room in /tmp"
        ) from error


def _tree_configuration(host: Host, packages: Mapping[str, Package]) -> str:
    """Options for a tree: its lists, sources and pins; not its apt.conf, which may name programs.

    Nothing is written there: no caches.
    """
    native = packages["dpkg"].architecture if "dpkg" in packages else None
    foreign = (read_text(host, _ARCHITECTURES) or "").split()
    present = [p.architecture for p in packages.values() if p.architecture != "all"]
    every = dict.fromkeys(filter(None, (native, *foreign, *present)))
    listed = "; ".join(f'"{architecture}"' for architecture in every)
    root = host.root
    return "\n".join(
        (
            f'Dir "{root}/";',
            f'Dir::State::status "{root}/var/lib/dpkg/status";',
            'Dir::Etc::main "/dev/null";',
            'Dir::Etc::parts "/dev/null";',
            'Dir::Cache::pkgcache "";',
            'Dir::Cache::srcpkgcache "";',
            *((f'APT::Architecture "{next(iter(every))}";',) if every else ()),
            *((f"APT::Architectures {{ {listed}; }};",) if every else ()),
            "",
        )
    )
