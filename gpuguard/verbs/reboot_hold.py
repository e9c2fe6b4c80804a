"""Hold a reboot back: while modules are built, and while the next kernel is not ready."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuguard.config import Config
from gpuguard.core.assess import Assessment
from gpuguard.core.facts import HostFacts
from gpuguard.errors import CommandError
from gpuguard.host import Host
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
    wanted = config.reboot.inhibit == "unready" and assessment.reboot.safe is False
    if not wanted:
        _release(host)
        return None
    reasons = [r.removeprefix("not safe: ") for r in assessment.reboot.reasons if "not safe" in r]
    why = f"the next boot would lose P2P: {'; '.join(reasons) or facts.next.reason}"
    if _is_held_for(host, why):
        return why
    _release(host)
    host.replace_file(HOLD_FILE, _environment(why, config.reboot.inhibit_seconds))
    host.run("systemctl", "start", "--no-block", UNIT, timeout=_SYSTEMCTL_SECONDS)
    return why


def _is_held_for(host: Host, why: str) -> bool:
    """True if this very reason has its time already; a run every hour must not prolong it."""
    with suppress(OSError):
        return f"WHY={_quoted(why)}\n" in host.path(HOLD_FILE).read_text()
    return False


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
