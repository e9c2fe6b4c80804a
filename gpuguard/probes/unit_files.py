"""systemd unit files with their drop-ins, and Podman's quadlets, as far as they set variables.

Grammar as systemd.syntax(7); search order as systemd.unit(5): a unit of an earlier folder
hides one of the same name in a later one, drop-ins of all folders apply by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text, real_path

UNIT_FOLDERS = (
    "/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system", "/lib/systemd/system",
)  # fmt: skip
QUADLET_FOLDERS = ("/etc/containers/systemd", "/usr/share/containers/systemd")
_SECTIONS = ("Service", "Container")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One ``Key=value`` line; ``source`` is the file."""

    key: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A unit with its drop-ins merged in order; ``text`` is all of it, to search in."""

    name: str
    path: str
    assignments: tuple[Assignment, ...]
    text: str
    unread: tuple[str, ...] = ()

    def values(self, key: str) -> list[Assignment]:
        """Assignments of a list setting; an empty one forgets those before it."""
        found: list[Assignment] = []
        for assignment in self.assignments:
            if assignment.key == key:
                found = [*found, assignment] if assignment.value else []
        return found

    def value(self, key: str) -> str:
        """The last assignment of a plain setting; empty if there is none."""
        return next((a.value for a in reversed(self.assignments) if a.key == key), "")


def probe_units(host: Host) -> tuple[UnitFile, ...]:
    """Every service and quadlet of the host.

    Raises:
        ProbeError: a folder of units cannot be listed.
    """
    services = _units(host, UNIT_FOLDERS, ".service")
    return (*services, *_units(host, QUADLET_FOLDERS, ".container"))


def parse_unit(text: str, source: str) -> Iterator[Assignment]:
    """Assignments of the ``[Service]`` and ``[Container]`` sections."""
    section = ""
    for raw in _joined(text):
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif section in _SECTIONS and "=" in line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            yield Assignment(key.strip(), value.strip(), source)


def _joined(text: str) -> Iterator[str]:
    held = ""
    for line in text.splitlines():
        if held and line.lstrip().startswith(("#", ";")):
            continue  # a comment between joined lines is skipped, systemd.syntax(7)
        if line.endswith("\\"):
            held += line[:-1] + " "
        else:
            yield held + line
            held = ""
    if held:
        yield held


def _units(host: Host, folders: tuple[str, ...], suffix: str) -> list[UnitFile]:
    paths: dict[str, str] = {}
    dropins: dict[str, dict[str, str]] = {}
    for folder in folders:
        for name in list_dir(host, folder):
            if name.endswith(suffix):
                paths.setdefault(name, f"{folder}/{name}")
            elif name.endswith(f"{suffix}.d"):
                for file in list_dir(host, f"{folder}/{name}"):
                    if file.endswith(".conf"):
                        own = dropins.setdefault(name.removesuffix(".d"), {})
                        own.setdefault(file, f"{folder}/{name}/{file}")
    return [
        _read(host, name, path, [file for _, file in sorted(dropins.get(name, {}).items())])
        for name, path in sorted(paths.items())
    ]


def _read(host: Host, name: str, path: str, dropins: list[str]) -> UnitFile:
    assignments: list[Assignment] = []
    texts, unread = [], []
    for file in (path, *dropins):
        try:
            if real_path(host, file) is None:  # masked: a link to /dev/null in a bare tree
                continue
            text = read_text(host, file) or ""
        except ProbeError as error:
            unread.append(error.message)
            continue
        texts.append(text)
        assignments += parse_unit(text, file)
    return UnitFile(name, path, tuple(assignments), "\n".join(texts), tuple(unread))
