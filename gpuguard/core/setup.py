"""What ``gpuguard setup`` puts where, and what it leaves alone: the decision, no I/O.

What the operator has changed is his: it is neither overwritten nor removed without ``force``,
and each such file is named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

UNIT_DIR = "/etc/systemd/system"
LIBRARY = "/usr/local/lib/gpuguard"
LOGIND_FILE = "/etc/systemd/logind.conf.d/gpuguard.conf"
TMPFILES_FILE = "/etc/tmpfiles.d/gpuguard.conf"
_SHARE = "/usr/local/share"

#: Resource -> path in the host, and mode. Units come with the folder ``systemd``.
_FILES = {
    "apt/apt-hook": (f"{LIBRARY}/apt-hook", 0o755),
    "apt/apt-check": (f"{LIBRARY}/apt-check", 0o755),
    "apt/99gpuguard": ("/etc/apt/apt.conf.d/99gpuguard", 0o644),
    "kernel/dkms-gpuguard": ("/etc/kernel/{}/dkms-gpuguard", 0o755),
    "logind/gpuguard.conf": (LOGIND_FILE, 0o644),
    "tmpfiles/gpuguard.conf": (TMPFILES_FILE, 0o644),
    "gpuguard.yaml.example": (f"{_SHARE}/doc/gpuguard/gpuguard.yaml.example", 0o644),
    "man/gpuguard.1": (f"{_SHARE}/man/man1/gpuguard.1", 0o644),
    "man/gpuguard.yaml.5": (f"{_SHARE}/man/man5/gpuguard.yaml.5", 0o644),
    "completion/bash": (f"{_SHARE}/bash-completion/completions/gpuguard", 0o644),
    "completion/zsh": (f"{_SHARE}/zsh/site-functions/_gpuguard", 0o644),
    "completion/fish": (f"{_SHARE}/fish/vendor_completions.d/gpuguard.fish", 0o644),
}
#: Resources for other programs to read where they lie: Prometheus, Alertmanager, Grafana.
_SHARED = ("prometheus/", "grafana/")
#: Starts the gate after boot. What a set-up starts comes before the first rebuild and the first
#: boot into it: the gate could but stay shut, and mark the system as degraded.
GATE_TIMER = "gpuguard-verify.timer"
#: By name between dkms and both dracut and initramfs-tools, as run-parts(8) sorts.
_KERNEL_HOOKS = ("postinst.d", "header_postinst.d", "postrm.d")
_UNIT_SUFFIXES = (".service", ".timer", ".path")
_WANTED_BY = re.compile(r"^WantedBy=(.*)$", re.MULTILINE)
_PLACEHOLDER = re.compile(rb"@[A-Z]+@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file (``content``, ``mode``) or a link (``target``) as it should be."""

    path: str
    content: bytes | None = None
    mode: int = 0o644
    target: str | None = None

    @property
    def mark(self) -> str:
        """Its state in one word."""
        if self.content is None:
            return f"link {self.target}"
        return f"{self.mode:04o} {hashlib.sha256(self.content).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is remembered of the last set-up: path -> mark.

    ``account``: one that it made; ``version``: of the gpuguard that ran it.
    """

    program: str
    marks: Mapping[str, str]
    created: str = ""
    account: str | None = None
    version: str = ""


class Do(StrEnum):
    """What happens to one path."""

    WRITE = "write"
    UPDATE = "update"
    ENABLE = "enable"
    REMOVE = "remove"
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One path; ``item`` None: it goes, or stays as it is. ``reason``: why it is kept."""

    do: Do
    path: str
    item: Item | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupPlan:
    """What to do, and what will be remembered: nothing after a removal of everything."""

    steps: tuple[Step, ...]
    record: Record | None

    @property
    def changes(self) -> tuple[Step, ...]:
        """The steps that change something."""
        return tuple(step for step in self.steps if step.do is not Do.KEEP)

    @property
    def kept(self) -> tuple[Step, ...]:
        """What is the operator's and stays."""
        return tuple(step for step in self.steps if step.do is Do.KEEP)


def items(resources: Mapping[str, bytes], values: Mapping[str, str]) -> tuple[Item, ...]:
    """Every file and link of a complete set-up.

    Args:
        resources: content by name: those of ``gpuguard/resources``, and the completions.
        values: for the placeholders, ``PROGRAM`` for ``@PROGRAM@``.
    """
    found: list[Item] = []
    for name, content in sorted(resources.items()):
        for path, mode in _places(name):
            found.append(Item(path=path, content=_filled(content, values), mode=mode))
            if path.startswith(f"{UNIT_DIR}/"):
                found += _links(path, content.decode())
    return tuple(found)


def plan_setup(
    wanted: Iterable[Item],
    found: Mapping[str, str | None],
    record: Record | None,
    *,
    program: str,
    account: str | None,
    created: str,
    version: str = "",
    force: bool = False,
) -> SetupPlan:
    """Decide for each path.

    Args:
        wanted: of ``items``.
        found: path -> mark of what is there now, None: nothing.
        record: of the last set-up.
        program: that the hooks and units call.
        account: that this or an earlier set-up has made.
        created: when.
        version: of this gpuguard.
        force: overwrite what the operator has changed, enable what he has disabled.
    """
    known = dict(record.marks) if record is not None else {}
    marks: dict[str, str] = {}
    steps: list[Step] = []
    for item in wanted:
        step = _step_for(item, found.get(item.path), known.get(item.path), force=force)
        if step is None or step.do is not Do.KEEP:
            marks[item.path] = item.mark
        elif item.path in known:
            marks[item.path] = known[item.path]
        steps += [step] if step is not None else []
    gone = {path: mark for path, mark in known.items() if path not in marks}
    gone = {p: m for p, m in gone.items() if p not in {step.path for step in steps}}
    steps += _removals(gone, found, force=force)
    # what is kept of an older version is not ours any more
    new = Record(program=program, marks=marks, created=created, account=account, version=version)
    return SetupPlan(steps=tuple(steps), record=new)


def plan_removal(
    record: Record, found: Mapping[str, str | None], *, force: bool = False
) -> SetupPlan:
    """Take away what a set-up has brought and nobody has changed since."""
    return SetupPlan(steps=tuple(_removals(record.marks, found, force=force)), record=None)


def started_units(resources: Mapping[str, bytes]) -> tuple[str, ...]:
    """Units that run from now on, the daemon last: those with an ``[Install]`` section."""
    names = [
        name.rpartition("/")[2]
        for name, content in resources.items()
        if name.startswith("systemd/") and _WANTED_BY.search(content.decode())
    ]
    return tuple(sorted(names, key=lambda name: (name.endswith(".service"), name)))


def is_enabled(unit: str, marks: Iterable[str]) -> bool:
    """True if a link of a ``.wants`` folder pulls a unit in."""
    return any(".wants/" in path and path.endswith(f"/{unit}") for path in marks)


def _places(name: str) -> Iterator[tuple[str, int]]:
    if name.startswith("systemd/"):
        unit = name.rpartition("/")[2]
        if unit.endswith(_UNIT_SUFFIXES):
            yield f"{UNIT_DIR}/{unit}", 0o644
    elif name in _FILES:
        path, mode = _FILES[name]
        for folder in _KERNEL_HOOKS if "{}" in path else ("",):
            yield path.replace("{}", folder), mode
    elif name.startswith(_SHARED):
        yield f"{_SHARE}/gpuguard/{name}", 0o644


def _filled(content: bytes, values: Mapping[str, str]) -> bytes:
    def value(match: re.Match[bytes]) -> bytes:
        name = match[0].decode().strip("@")
        return values[name].encode() if name in values else match[0]

    return _PLACEHOLDER.sub(value, content)


def _links(path: str, text: str) -> list[Item]:
    # as `systemctl enable` makes them
    unit = path.rpartition("/")[2]
    targets = [word for line in _WANTED_BY.findall(text) for word in line.split()]
    return [Item(path=f"{UNIT_DIR}/{target}.wants/{unit}", target=path) for target in targets]


def _step_for(item: Item, now: str | None, known: str | None, *, force: bool) -> Step | None:
    if now == item.mark:
        return None
    do = Do.ENABLE if item.target is not None else Do.WRITE if now is None else Do.UPDATE
    step = Step(do=do, path=item.path, item=item)
    if force or (now is None and item.target is None):
        return step
    if now is None:
        disabled = known is not None
        return Step(do=Do.KEEP, path=item.path, reason="disabled") if disabled else step
    if now == known:
        return step
    return Step(do=Do.KEEP, path=item.path, reason="changed")


def _removals(
    marks: Mapping[str, str], found: Mapping[str, str | None], *, force: bool
) -> Iterator[Step]:
    for path, mark in marks.items():
        now = found.get(path)
        if now is None:
            continue
        if now == mark or force:
            yield Step(do=Do.REMOVE, path=path)
        else:
            yield Step(do=Do.KEEP, path=path, reason="changed")
