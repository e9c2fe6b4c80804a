"""Keep the boot default on the last kernel that is ready, and let it go again.

One setting of ours, in a file by which it is known again; what boots next is read back, and a
change that does not have that effect is undone.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from gpuguard.apply.actions import (
    Action,
    CheckNextKernel,
    PutFile,
    RemoveFile,
    UpdateBootMenu,
)
from gpuguard.apply.boot_menu import menu_command
from gpuguard.apply.transaction import apply
from gpuguard.config import Config
from gpuguard.core.boot_default import Decision, Pinning, decide
from gpuguard.core.facts import BootPin, HostFacts
from gpuguard.core.policy import Policy
from gpuguard.errors import PreflightError, StateError
from gpuguard.host import Host
from gpuguard.host.reading import read_text, real_path
from gpuguard.probes.boot_pin import (
    GRUB_FILE,
    LOADER_FILES,
    grub_entry,
    loader_entry,
    mark,
    pinned_loader,
    probe_boot_pin,
    unpinned_loader,
)
from gpuguard.window import Phase, read_window

_MENUS = ("/boot/grub/grub.cfg", "/boot/grub2/grub.cfg")
_IMPOSSIBLE = "boot-default-impossible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What was done about the boot default; ``release``: what it was set to."""

    pinning: Pinning
    reason: str
    release: str | None = None


def settle_boot_default(host: Host, config: Config, facts: HostFacts, why: str) -> Settled:
    """Set the boot default to the last good kernel if the next is not ready, or let it go.

    Args:
        host: where; the caller holds the lock, and nothing is interrupted.
        config: ``reboot.keep_last_good``.
        facts: as they are now.
        why: ``window`` may set it by the default policy; anything else may with ``always``, or
            while a window waits for its boot, and may always let it go.

    Raises:
        PreflightError: ``boot-default-impossible``: this boot loader cannot be told.
        VerifyError: it had not the effect; everything is as before.
        StateError, ProbeError: something could not be looked at or written.
    """
    keep = config.reboot.keep_last_good
    in_window = why == "window" or _window_waits(host)
    decision = decide(
        facts,
        Policy(ignored_kernels=config.kernels.ignore),
        wanted=keep != "never",
        may_pin=keep == "always" or in_window,
    )
    actions = _actions(host, facts, decision)
    if actions:
        apply(
            actions, host, verb="boot-default", release=decision.release or "the newest kernel",
            started=why, backup=None,
        )  # fmt: skip
    return Settled(pinning=decision.pinning, reason=decision.reason, release=decision.release)


def let_go(host: Host, why: str) -> BootPin | None:
    """Take our setting away whatever boots then; what it was, None: there was none.

    Raises:
        PreflightError, VerifyError, StateError, ProbeError: as ``settle_boot_default``.
    """
    pin = probe_boot_pin(host)
    if pin is not None:
        apply(
            _unpin(host, pin, ()), host, verb="boot-default", release="the newest kernel",
            started=why, backup=None,
        )  # fmt: skip
    return pin


def _actions(host: Host, facts: HostFacts, decision: Decision) -> tuple[Action, ...]:
    match decision.pinning:
        case Pinning.PIN if decision.release is not None:
            return _pin(host, facts, decision.release, decision.reason)
        case Pinning.UNPIN if facts.boot_pin is not None:
            return _unpin(host, facts.boot_pin, decision.ready)
        case _:
            return ()


def _pin(host: Host, facts: HostFacts, release: str, why: str) -> tuple[Action, ...]:
    loader = facts.boot_pin.loader if facts.boot_pin is not None else facts.next.source
    if loader == "grub":
        change = _grub(host, release, why)
    elif loader == "systemd-boot":
        change = _systemd_boot(host, facts, release, why)
    else:
        raise PreflightError(
            f"the boot default cannot be kept on {release}: gpuguard cannot set that of "
            f"{'this boot loader' if loader == 'none' else loader}",
            code=_IMPOSSIBLE,
            hint=f"before the next reboot make {release} the default by hand",
        )
    return (*change, CheckNextKernel(releases=(release,)))


def _unpin(host: Host, pin: BootPin, ready: tuple[str, ...]) -> tuple[Action, ...]:
    check = (CheckNextKernel(releases=ready),) if ready else ()
    if pin.loader == "grub":
        return (RemoveFile(path=pin.path), UpdateBootMenu(path=_menu(host)), *check)
    text = unpinned_loader(read_text(host, pin.path) or "")
    return (PutFile(path=pin.path, source=text.encode()), *check)


def _grub(host: Host, release: str, why: str) -> tuple[Action, ...]:
    menu = _menu(host)
    menu_command(menu, host)
    entry = grub_entry(host, menu, release)
    if entry is None:
        raise PreflightError(
            f"the boot default cannot be kept on {release}: {menu} has no entry for it",
            code=_IMPOSSIBLE,
            hint="update-grub, and see: grep menuentry " + menu,
        )
    text = (
        f"{mark(release, why)}\n"
        "# gpuguard takes this away once the newest kernel is ready. By hand: rm this file, then\n"
        "# update-grub.\n"
        f"GRUB_DEFAULT={shlex.quote(entry)}\n"
    )
    return (PutFile(path=GRUB_FILE, source=text.encode()), UpdateBootMenu(path=menu))


def _systemd_boot(host: Host, facts: HostFacts, release: str, why: str) -> tuple[Action, ...]:
    installed = tuple(kernel.release for kernel in facts.kernels if kernel.image is not None)
    entry = loader_entry(host, installed, release)
    path = next((p for p in LOADER_FILES if real_path(host, p) is not None), None)
    if entry is None or path is None:
        raise PreflightError(
            f"the boot default cannot be kept on {release}: systemd-boot has no "
            f"{'loader.conf' if path is None else 'entry for it'}",
            code=_IMPOSSIBLE,
            hint="bootctl list, then bootctl set-default",
        )
    text = pinned_loader(read_text(host, path) or "", entry, release, why)
    return (PutFile(path=path, source=text.encode()),)


def _menu(host: Host) -> str:
    found = next((menu for menu in _MENUS if real_path(host, menu) is not None), None)
    if found is None:
        raise PreflightError(
            "the boot default cannot be set: there is no grub.cfg",
            code=_IMPOSSIBLE,
            hint="update-grub",
        )
    return found


def _window_waits(host: Host) -> bool:
    try:
        window = read_window(host)
    except StateError:  # a finding of its own
        return False
    return window is not None and window.phase is not Phase.PREFLIGHT
