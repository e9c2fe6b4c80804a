"""Hold a reboot back: while modules are built, and while the next kernel is not ready."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuguard.config import Config
from gpuguard.core.assess import Assessment
from gpuguard.core.facts import HostFacts
from gpuguard.errors import CommandError, StateError
from gpuguard.host import Host
from gpuguard.host.files import writable_by_others
from gpuguard.host.inhibit import reboot_held
from gpuguard.state import RUN_DIR

UNIT = "gpuguard-hold-reboot.service"
HOLD_FILE = f"{RUN_DIR}/hold-reboot.env"  # the unit's EnvironmentFile: WHY and SECONDS
_SYSTEMD = Path("/run/systemd/system")  # sd_booted(3)
_SYSTEMCTL_SECONDS = 30.0


@contextmanager
def while_building(host: Host, config: Config, releases: tuple[str, ...]) -> Iterator[None]:
    """A shutdown inhibitor for as long as modules are built and put in place."""
    if not releases or not host.is_live or config.reboot.inhibit == "never":
        yield
        return
    with reboot_held(f"patched NVIDIA modules are being built for {', '.join(releases)}"):
        yield


@contextmanager
def while_window(host: Host, config: Config) -> Iterator[None]:
    """A shutdown inhibitor for as long as a maintenance window is open."""
    if not host.is_live or config.reboot.inhibit == "never":
        yield
        return
    with reboot_held("gpuguard upgrade: kernels and drivers are being installed"):
        yield


def settle(host: Host, config: Config, facts: HostFacts, assessment: Assessment) -> str | None:
    """Hold a reboot back, or let it go, by what would boot next; why it is held, if it is.

    A unit of its own holds the lock: it outlives the run that found the kernel not ready, and
    ends by itself after ``reboot.inhibit_seconds``.
    """
    if not host.is_live or not _SYSTEMD.is_dir():
        return None
    if config.reboot.inhibit != "unready" or assessment.reboot.safe or _is_chosen(facts):
        _release(host)
        return None
    reasons = [r.removeprefix("not safe: ") for r in assessment.reboot.reasons if "not safe" in r]
    why = f"the next boot would lose P2P: {'; '.join(reasons) or facts.next.reason}"
    if _has_had_its_time(host, why):  # a run every hour must not prolong it
        return why if _is_active(host) else None
    _release(host)
    _refuse_untrusted(host)
    host.replace_file(HOLD_FILE, _environment(why, config.reboot.inhibit_seconds))
    host.run("systemctl", "start", UNIT, timeout=_SYSTEMCTL_SECONDS)
    return why


def _is_chosen(facts: HostFacts) -> bool:
    """An operator put stock modules back into the next kernel: he means to boot it so."""
    return any(k.left_alone for k in facts.kernels if k.release == facts.next.release)


def _has_had_its_time(host: Host, why: str) -> bool:
    with suppress(OSError):
        return f"WHY={_quoted(why)}\n" in host.path(HOLD_FILE).read_text()
    return False


def _is_active(host: Host) -> bool:
    done = host.run("systemctl", "is-active", "-q", UNIT, timeout=_SYSTEMCTL_SECONDS, ok=None)
    return done.exit_status == os.EX_OK


def _refuse_untrusted(host: Host) -> None:
    """The unit's environment comes from this folder, and the unit runs as root.

    Raises:
        StateError: others than root can write there.
    """
    folder = host.path(RUN_DIR)
    folder.mkdir(mode=0o755, exist_ok=True)
    if reason := writable_by_others(folder):
        raise StateError(
            f"{RUN_DIR} is not to be trusted: {reason}; a reboot is not held back",
            code="run-untrusted",
            hint=f"chown root:root {RUN_DIR} && chmod 755 {RUN_DIR}",
        )


def _release(host: Host) -> None:
    if host.path(HOLD_FILE).exists():
        with suppress(CommandError):  # not installed: nothing that could hold
            host.run("systemctl", "stop", UNIT, timeout=_SYSTEMCTL_SECONDS)
        host.remove_file(HOLD_FILE)


def _environment(why: str, seconds: float) -> bytes:
    return f"WHY={_quoted(why)}\nSECONDS={seconds:g}\n".encode()


def _quoted(text: str) -> str:
    # systemd.exec(5), EnvironmentFile=: double quotes, backslashes escape; one line
    plain = "".join(char if char.isprintable() else " " for char in text)
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return '"' + escaped.replace("`", "\\`") + '"'
