"""Selections of packages, told to dpkg itself and read back.

Not apt-mark: ``apt-mark -o Dir=TREE hold`` puts the hold on the live host, and with one unknown
name it holds the others and fails. ``dpkg --root=TREE --set-selections`` takes them all in one
call or, on a name that it cannot make sense of, none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from gpuguard.apply.lock import wait_for_package_tools
from gpuguard.core.packages import Package
from gpuguard.errors import CommandError, LockHeldError, VerifyError
from gpuguard.host import Host
from gpuguard.probes.dpkg import read_packages

_DPKG_SECONDS = 60.0
_LOCK_WORDS = ("lock was locked", "unable to lock", "unable to access the dpkg")
HOLD = "hold"


def released(package: Package) -> str:
    """The selection of a package that is no longer on hold."""
    if not package.is_gone:
        return "install"
    return "deinstall" if package.status == "config-files" else "purge"


def set_selections(host: Host, wanted: Mapping[str, str], *, timeout: float) -> None:
    """Give packages these selections (``hold``, ``install``, …), by name as apt-mark prints it.

    Raises:
        LockHeldError: apt or dpkg was still at work after ``timeout`` seconds.
        CommandError: dpkg failed; VerifyError: it took some of them only, and which not.
    """
    deadline = time.monotonic() + timeout
    wait_for_package_tools(host, timeout)
    packages = read_packages(host)
    # with the architecture: dpkg refuses a plain name that two architectures have
    lines = [
        f"{p.name}:{p.architecture} {selection}\n"
        for name, selection in sorted(wanted.items())
        if (p := packages.get(name)) is not None and p.selection != selection
    ]
    while lines and (error := _tell_dpkg(host, "".join(lines))) is not None:
        # apt took its lock between our look and dpkg's: wait as long as is left
        if not any(word in error.detail for word in _LOCK_WORDS):
            raise error
        left = deadline - time.monotonic()
        if left <= 0:
            raise LockHeldError(
                f"apt or dpkg is at work, still after {timeout:g} s",
                hint="wait until it is done and try again; no hold was changed",
            ) from error
        wait_for_package_tools(host, left)
    _read_back(host, wanted)


def _tell_dpkg(host: Host, lines: str) -> CommandError | None:
    root = () if host.is_live else ("--force-not-root", f"--root={host.root}")
    memory = os.memfd_create("gpuguard-selections", os.MFD_CLOEXEC)  # no disk that may be full
    try:
        os.write(memory, lines.encode())
        given = Path(f"/proc/self/fd/{memory}")
        host.run("dpkg", *root, "--set-selections", timeout=_DPKG_SECONDS, stdin=given)
    except CommandError as error:
        return error
    finally:
        os.close(memory)
    return None


def _read_back(host: Host, wanted: Mapping[str, str]) -> None:
    packages = read_packages(host)
    other = {
        name: packages[name].selection if name in packages else "unknown to dpkg"
        for name, selection in sorted(wanted.items())
        if name not in packages or packages[name].selection != selection
    }
    if other:
        raise VerifyError(
            f"dpkg did not take {len(other)} of {len(wanted)} selections: {', '.join(other)}",
            code="hold-not-taken",
            hint="see dpkg --get-selections and gpuguard holds; then try again",
            detail="\n".join(
                f"{name}: {found}, wanted {wanted[name]}" for name, found in other.items()
            ),
        )
