"""Which units cannot start without one of some units: they would fail once that is gone.

Unit files, drop-ins, ``.requires`` folders and quadlets are read, since systemd knows only
what it has loaded; where it runs, it is asked as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text, real_path
from gpuguard.probes.unit_files import QUADLET_FOLDERS, UNIT_FOLDERS

_FOLDERS = (
    "/etc/systemd/system.control", "/run/systemd/system.control", "/run/systemd/transient",
    "/run/systemd/generator.early", *UNIT_FOLDERS, "/run/systemd/generator",
    "/run/systemd/generator.late",
)  # fmt: skip
_TYPES = (".service", ".target", ".socket", ".timer", ".path", ".mount", ".slice", ".scope")
_STRICT = ("Requires", "BindsTo", "Requisite")
_LOADED = ("RequiredBy", "BoundBy", "RequisiteOf")
_SYSTEMCTL_SECONDS = 30.0


@dataclass(frozen=True, slots=True, order=True)
class Dependent:
    """``unit`` needs ``needs``, because of ``path`` (empty: systemd says so)."""

    unit: str
    needs: str
    path: str

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.unit} needs {self.needs}" + (f" ({self.path})" if self.path else "")


def probe_dependents(
    host: Host, units: Sequence[str], *, ask_systemd: bool
) -> tuple[Dependent, ...]:
    """All that is not itself one of ``units``.

    Raises:
        ProbeError: a unit file or a folder of them cannot be read.
        CommandError: systemd does not answer.
    """
    found = {
        (one.unit, one.needs): one
        for one in _written(host, frozenset(units))
        if one.unit not in units
    }
    if ask_systemd:
        for one in _loaded(host, units):
            found.setdefault((one.unit, one.needs), one)
    return tuple(sorted(found.values()))


def _written(host: Host, units: frozenset[str]) -> Iterator[Dependent]:
    hidden: set[str] = set()
    for folder in (*_FOLDERS, *QUADLET_FOLDERS):
        for name in list_dir(host, folder):
            path = f"{folder}/{name}"
            if name.endswith(".d"):
                for file in list_dir(host, path):
                    if file.endswith(".conf"):
                        yield from _in_file(host, name.removesuffix(".d"), f"{path}/{file}", units)
            elif name.endswith(".requires"):
                for needed in sorted(units.intersection(list_dir(host, path))):
                    yield Dependent(name.removesuffix(".requires"), needed, f"{path}/{needed}")
            elif name.endswith((*_TYPES, ".container")) and name not in hidden:
                hidden.add(name)  # systemd.unit(5): the first folder's counts
                yield from _in_file(host, name, path, units)


def _in_file(host: Host, name: str, path: str, units: frozenset[str]) -> Iterator[Dependent]:
    if real_path(host, path) is None:  # a link to nothing
        return
    unit = f"{name.removesuffix('.container')}.service" if name.endswith(".container") else name
    text = (read_text(host, path) or "").replace("\\\n", " ")
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() in _STRICT:
            for needed in value.split():
                if needed in units:
                    yield Dependent(unit, needed, path)


def _loaded(host: Host, units: Sequence[str]) -> Iterator[Dependent]:
    for needed in units:
        words = [f"--property={name}" for name in _LOADED]
        done = host.run("systemctl", "show", *words, "--", needed, timeout=_SYSTEMCTL_SECONDS)
        for line in done.stdout.splitlines():
            for unit in line.partition("=")[2].split():
                if unit not in units:
                    yield Dependent(unit, needed, "")
