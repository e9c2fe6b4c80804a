"""What ``gpuguard setup`` installed, as it is now: a few small files, one call of systemctl."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from gpuguard.core.automation import AutomationFacts
from gpuguard.core.setup import GATE_TIMER, LIBRARY, UNIT_DIR, Record
from gpuguard.errors import GpuguardError, StateError
from gpuguard.host.files import sha256_file
from gpuguard.host.port import Host
from gpuguard.last_run import read_last_run
from gpuguard.setup_record import read_setup
from gpuguard.state import CONFIG_DROPINS, CONFIG_FILE

_SYSTEMD = Path("/run/systemd/system")  # sd_booted(3)
_SYSTEMCTL_SECONDS = 5.0
_HOOKS = (f"{LIBRARY}/", "/etc/apt/", "/etc/kernel/")
_RUNS = ("active", "reloading", "activating")


def probe_automation(host: Host) -> AutomationFacts | None:
    """Is it all still there and alive; None: nothing was set up."""
    try:
        record = read_setup(host)
    except StateError as error:
        return AutomationFacts(problem=error.message)
    if record is None:
        return None
    units = tuple(unit for unit, _ in _links(record))
    disabled = tuple(
        unit for unit, path in _links(record) if not host.path(path, follow=False).is_symlink()
    )
    stopped, problem = _stopped(host, tuple(u for u in units if u not in disabled))
    return AutomationFacts(
        program=record.program,
        program_is_there=_is_program(host, record.program),
        faults=tuple(_faults(host, record)),
        disabled=disabled,
        stopped=stopped,
        is_configured=_is_configured(host),
        idle_seconds=_idle_seconds(host, record) if host.is_live else None,
        up_seconds=_up_seconds(host),
        problem=problem,
    )


def mark_of(host: Host, path: str) -> str | None:
    """What is at a path, as ``core.setup.Item.mark`` has it; None: nothing.

    Raises:
        StateError: it cannot be read.
    """
    real = host.path(path, follow=False)
    try:
        status = real.lstat()
        if stat.S_ISLNK(status.st_mode):
            return f"link {real.readlink()}"
        if not stat.S_ISREG(status.st_mode):
            return "odd"
        return f"{stat.S_IMODE(status.st_mode):04o} {sha256_file(real)}"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror}", hint="run gpuguard as root"
        ) from error


def _faults(host: Host, record: Record) -> Iterator[tuple[str, str]]:
    for path, mark in record.marks.items():
        if not path.startswith(_HOOKS):
            continue
        try:
            now = mark_of(host, path)
        except StateError:
            yield path, "unreadable"
            continue
        if now is None:
            yield path, "missing"
        elif now != mark:
            is_same = now.partition(" ")[2] == mark.partition(" ")[2]
            yield path, "not executable" if is_same and not _is_program(host, path) else "changed"


def _links(record: Record) -> Iterator[tuple[str, str]]:
    for path in record.marks:
        if path.startswith(f"{UNIT_DIR}/") and ".wants/" in path:
            yield path.rpartition("/")[2], path


def _is_program(host: Host, path: str) -> bool:
    with suppress(OSError):
        status = host.path(path).stat()
        return stat.S_ISREG(status.st_mode) and bool(status.st_mode & 0o111)
    return False


def _is_configured(host: Host) -> bool:
    with suppress(OSError):
        names = os.listdir(host.path(CONFIG_DROPINS))  # noqa: PTH208 - names are enough
        if any(name.endswith(".yaml") for name in names):
            return True
    return os.path.lexists(host.path(CONFIG_FILE, follow=False))


def _stopped(host: Host, units: tuple[str, ...]) -> tuple[tuple[tuple[str, str], ...], str | None]:
    if not (units and host.is_live and _SYSTEMD.is_dir()):
        return (), None
    try:
        done = host.run("systemctl", "is-active", *units, timeout=_SYSTEMCTL_SECONDS, ok=None)
    except GpuguardError as error:
        return (), error.message
    states = done.stdout.split()
    if len(states) != len(units):
        if os.geteuid() != 0:
            # The daemon's account is not known to D-Bus everywhere. Root's own runs look, too,
            # and that there are none any more is seen by the time of the last one.
            return (), None
        return (), f"systemctl said: {(done.stderr or done.stdout).strip()[:200]}"
    found = zip(units, states, strict=True)
    return tuple((unit, state) for unit, state in found if not _is_right(unit, state)), None


def _is_right(unit: str, state: str) -> bool:
    # a set-up leaves the gate's timer to the next boot
    return state in _RUNS or (unit == GATE_TIMER and state == "inactive")


def _idle_seconds(host: Host, record: Record) -> float | None:
    last = None
    with suppress(StateError):
        last = read_last_run(host)
    with suppress(ValueError):
        # the clock may have been put back since: then it is as if it were now
        then = datetime.fromisoformat(last.finished if last is not None else record.created)
        return max(0.0, time.time() - then.timestamp())
    return None


def _up_seconds(host: Host) -> float | None:
    with suppress(OSError, ValueError, IndexError):
        return float(host.path("/proc/uptime").read_text().split()[0])
    return None
