"""Tell the running systemd about the units of a set-up; elsewhere nothing happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpuguard.core.setup import (
    GATE_TIMER,
    LOGIND_FILE,
    TMPFILES_FILE,
    UNIT_DIR,
    Do,
    SetupPlan,
    is_enabled,
)
from gpuguard.errors import CommandError, GpuguardError
from gpuguard.host import Host

_SYSTEMD = Path("/run/systemd/system")  # sd_booted(3)
_SYSTEMCTL_SECONDS = 120.0
_DAEMON = "gpuguard.service"
GATE = "gpuguard-verify.service"


@dataclass(slots=True, kw_only=True)
class Effects:
    """What systemd was told, and what it could not do: unit -> why."""

    started: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def has_systemd(host: Host) -> bool:
    """True on a running system that systemd has booted."""
    return host.is_live and _SYSTEMD.is_dir()


def start(
    host: Host, plan: SetupPlan, units: Sequence[str], *, is_upgrade: bool = False
) -> Effects:
    """Let systemd see the new files, and start what runs from now on.

    With ``is_upgrade`` the daemon is restarted: it runs the code of before. The gate's timer
    waits for the next boot.
    """
    effects = Effects()
    if not has_systemd(host):
        return effects
    reload(host, plan, effects, also=_is_outdated(host, units))
    _make_run_folder(host, effects)
    marks = plan.record.marks if plan.record is not None else {}
    enabled = [u for u in units if is_enabled(u, marks) and _is_linked(host, u, marks)]
    enabled = [unit for unit in enabled if unit != GATE_TIMER]
    updated = {step.path for step in plan.steps if step.do is Do.UPDATE}
    active = _active(host, enabled)
    for unit in enabled:
        if unit not in active:
            _systemctl(host, effects, "start", unit)
        elif f"{UNIT_DIR}/{unit}" in updated or (is_upgrade and unit == _DAEMON):
            _systemctl(host, effects, "restart", unit)
    return effects


def stop(host: Host, units: Sequence[str]) -> Effects:
    """Stop what a set-up has started: first what starts others, then the services.

    Not the gate: systemd would stop whatever serves behind it, and there is nothing to stop.
    """
    effects = Effects()
    if has_systemd(host):
        for unit in sorted(units, key=lambda name: (name.endswith(".service"), name)):
            if unit != GATE:
                _systemctl(host, effects, "stop", unit)
        with suppress(CommandError):  # its cache; there is none if it never ran
            host.run("systemctl", "clean", "--what=cache", _DAEMON, timeout=_SYSTEMCTL_SECONDS)
    return effects


def reload(host: Host, plan: SetupPlan, effects: Effects, *, also: bool = False) -> None:
    """Let systemd read files that did change; ``also``: it says itself that it should.

    Only then: a reload makes systemd apply its device rules anew, which takes the cards away
    from containers that were given them by other means (CASES C57).
    """
    changed = [step.path for step in plan.changes]
    if not has_systemd(host):
        return
    if also or any(path.startswith(f"{UNIT_DIR}/") for path in changed):
        _systemctl(host, effects, "daemon-reload")
    if LOGIND_FILE in changed:
        _systemctl(host, effects, "kill", "--signal=HUP", "systemd-logind.service")


def _make_run_folder(host: Host, effects: Effects) -> None:
    """At once what systemd does at each boot; a folder that others can write is put right."""
    if not host.path(TMPFILES_FILE).is_file():
        return
    try:
        host.run("systemd-tmpfiles", "--create", TMPFILES_FILE, timeout=_SYSTEMCTL_SECONDS)
    except GpuguardError as error:
        effects.failed["systemd-tmpfiles"] = (error.detail or error.message).splitlines()[0]


def _systemctl(host: Host, effects: Effects, *words: str) -> None:
    what = words[-1]
    try:
        host.run("systemctl", *words, timeout=_SYSTEMCTL_SECONDS)
    except GpuguardError as error:
        effects.failed[what] = (error.detail or error.message).splitlines()[0]
        return
    if words[0] in ("start", "restart"):
        effects.started.append(what)


def _active(host: Host, units: Sequence[str]) -> set[str]:
    """Those that run now; is-active prints a line for each."""
    if not units:
        return set()
    with suppress(CommandError):
        done = host.run("systemctl", "is-active", *units, timeout=_SYSTEMCTL_SECONDS, ok=None)
        states = zip(units, done.stdout.split(), strict=False)
        return {unit for unit, state in states if state == "active"}
    return set()


def _is_outdated(host: Host, units: Sequence[str]) -> bool:
    """True if systemd has another content of a unit in mind, as after a set-up with --no-start."""
    with suppress(CommandError):
        words = ("show", "--property=NeedDaemonReload", *units)
        return "yes" in host.run("systemctl", *words, timeout=_SYSTEMCTL_SECONDS, ok=None).stdout
    return False


def _is_linked(host: Host, unit: str, marks: Mapping[str, str]) -> bool:
    links = [path for path in marks if ".wants/" in path and path.endswith(f"/{unit}")]
    return any(host.path(path, follow=False).is_symlink() for path in links)
