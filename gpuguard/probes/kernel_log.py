"""What the kernel said about the cards since it booted: NVRM, Xid and IOMMU faults.

From journald on a running system, else from ``dmesg``, else from ``kern.log``. A log that may
not be read is "could not look"; an empty one too, for every kernel says something at boot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from gpuguard.core.doctor_facts import LogFacts, LogFault
from gpuguard.errors import CommandError
from gpuguard.host.port import Host
from gpuguard.host.reading import absent_is_none
from gpuguard.probes.p2p import normal_bus_id

KERN_LOG = "/var/log/kern.log"
_DEADLINE = 20.0
_TAIL_BYTES = 16 << 20
_RELEVANT = re.compile(r"NVRM|IO_PAGE_FAULT|DMAR:.*fault addr|Linux version \d")
_JOURNAL = ("journalctl", "-k", "-b", "--no-pager", "-o", "short-unix")
_DMESG = ("dmesg", "--time-format", "iso")
_REFUSED = re.compile(r"insufficient permissions|not seeing messages from|Operation not permitted")
#: A line of the kernel's own; journalctl also prints remarks, and exits with 0 after them.
_KERNEL_LINE = re.compile(r"^\S+ \S+ kernel: |^\d{4}-\d\d-\d\dT\S+ |^\[ *\d+\.\d+\]")
_SANDBOX = "Starting gVisor"  # its dmesg is a fake

_BDF = r"(?P<card>(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
#: Newer drivers write ``Xid (PCI:0000:06:00): 79, pid=…``, old ones ``Xid (0000:06:00): 79``.
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?{_BDF}\): (?P<xid>\d+)")
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("fallen-off", re.compile(rf"NVRM: .*?{_BDF}.*fallen off the bus")),
    ("page-fault", re.compile(rf"{_BDF}: AMD-Vi: .*IO_PAGE_FAULT")),
    ("page-fault", re.compile(rf"IO_PAGE_FAULT device=(?:0000:)?{_BDF}")),
    ("page-fault", re.compile(rf"DMAR: .*Request device \[{_BDF}\] fault addr")),
    ("bound", re.compile(rf"NVRM: .*?{_BDF} is already bound to (?P<driver>[\w-]+)")),
    ("init-failed", re.compile(rf"NVRM: .*?{_BDF}.*RmInitAdapter failed")),
)
#: osapi.c prints this fault over three lines; others may come between (CASES C48).
_HEAD = re.compile(rf"NVRM: The NVIDIA GPU {_BDF}")
_TAIL = "fallen off the bus"
_REACH = 6
_NAMELESS = re.compile(r"NVRM: (The NVIDIA probe routine failed for \d+ device|No NVIDIA devices)")
_FALLEN_XID = 79

_UNIX_TIME = re.compile(r"^(\d{9,}\.\d+) ")
_ISO_TIME = re.compile(r"^(\d{4}-\d\d-\d\dT\S+) ")
_SYSLOG_TIME = re.compile(r"^([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) ")


@dataclass(frozen=True, slots=True)
class _Line:
    time: str
    text: str  # from the kernel's own words on


def probe_kernel_log(host: Host) -> LogFacts:
    """Faults of this boot, one per card and kind, with the time of the newest."""
    if not host.is_live:
        return _kern_log(host)
    problems = []
    for command in (_JOURNAL, _DMESG):
        facts = _from_command(host, command)
        if facts.source is not None:
            return facts
        problems.append(facts.problem)
    facts = _kern_log(host)
    if facts.source is not None:
        return facts
    return LogFacts(problem="; ".join(dict.fromkeys((*problems, facts.problem))))


def parse_kernel_log(lines: Iterable[str]) -> tuple[LogFault, ...]:
    """Faults of the newest boot in these lines, deduplicated per card and kind (and Xid)."""
    found: dict[tuple[str, str, int | None], LogFault] = {}
    for fault in _faults(list(_newest_boot(lines))):
        key = (fault.kind, fault.card, fault.xid)
        known = found.get(key)
        found[key] = replace(fault, count=known.count + 1) if known else fault
    return tuple(found.values())


def _from_command(host: Host, command: tuple[str, ...]) -> LogFacts:
    kept: list[str] = []
    seen = [0]
    try:
        host.run(*command, timeout=_DEADLINE, on_line=_keeper(kept, seen))
    except CommandError as error:
        return LogFacts(problem=error.message)
    said = next((line for line in kept if _REFUSED.search(line) or _SANDBOX in line), None)
    if said is not None or not seen[0]:
        return LogFacts(problem=f"{command[0]}: {said or 'no lines of this boot'}")
    return LogFacts(source=" ".join(command), faults=parse_kernel_log(kept))


def _keeper(kept: list[str], seen: list[int]) -> Callable[[str], None]:
    def keep(line: str) -> None:
        seen[0] += bool(_KERNEL_LINE.match(line))
        if _RELEVANT.search(line) or _REFUSED.search(line) or _SANDBOX in line:
            kept.append(line)

    return keep


def _kern_log(host: Host) -> LogFacts:
    try:
        with absent_is_none(KERN_LOG), host.path(KERN_LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return LogFacts(problem=f"there is no {KERN_LOG}")
    except Exception as error:  # noqa: BLE001 - ProbeError, or OSError while reading
        return LogFacts(problem=str(error))
    if not text.strip():
        return LogFacts(problem=f"{KERN_LOG} is empty")
    lines = (line for line in text.splitlines() if _RELEVANT.search(line))
    return LogFacts(source=KERN_LOG, faults=parse_kernel_log(lines))


def _newest_boot(lines: Iterable[str]) -> Iterator[_Line]:
    boot: list[_Line] = []
    time = ""
    for raw in lines:
        for part in raw.split("\\x0a"):  # a message of several lines, as /dev/kmsg has it
            time = _time(part) or time
            if "Linux version " in part:
                boot = []
            elif (at := part.find("NVRM")) >= 0 and "AMD-Vi" not in part:
                boot.append(_Line(time, part[at:].rstrip()))
            elif _RELEVANT.search(part):
                boot.append(_Line(time, part.rpartition("kernel: ")[2].strip()))
    yield from boot


def _time(line: str) -> str:
    if match := _UNIX_TIME.match(line):
        return datetime.fromtimestamp(float(match[1]), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    match = _ISO_TIME.match(line) or _SYSLOG_TIME.match(line)
    return match[1] if match else ""


def _faults(lines: list[_Line]) -> Iterator[LogFault]:
    for at, line in enumerate(lines):
        if match := _XID.search(line.text):
            xid = int(match["xid"])
            kind = "fallen-off" if xid == _FALLEN_XID else "xid"
            yield _fault(kind, match["card"], line, xid if kind == "xid" else None)
        elif fault := _by_pattern(line):
            yield fault
        elif (match := _HEAD.search(line.text)) and (text := _three_lines(lines, at)):
            yield _fault("fallen-off", match["card"], _Line(line.time, text))
        elif _NAMELESS.search(line.text):
            yield LogFault(kind="init-failed", card="", text=line.text, time=line.time)


def _by_pattern(line: _Line) -> LogFault | None:
    for kind, pattern in _PATTERNS:
        if match := pattern.search(line.text):
            return _fault(kind, match["card"], line)
    return None


def _three_lines(lines: list[_Line], at: int) -> str | None:
    """The whole sentence that begins in a line; None if it is about something else."""
    words = [lines[at].text]
    for line in lines[at + 1 : at + 1 + _REACH]:
        words.append(line.text.removeprefix("NVRM: "))
        if _TAIL in line.text:
            return " ".join(words)
        if _HEAD.search(line.text):
            return None
    return None


def _fault(kind: str, card: str, line: _Line, xid: int | None = None) -> LogFault:
    return LogFault(kind=kind, card=_address(card), text=line.text, time=line.time, xid=xid)


def _address(card: str) -> str:
    """``0000:06:00.0`` for ``0000:06:00``, ``06:00.0`` and ``00000000:06:00.0``."""
    whole = card if "." in card else f"{card}.0"
    return normal_bus_id(whole if whole.count(":") > 1 else f"0000:{whole}")
