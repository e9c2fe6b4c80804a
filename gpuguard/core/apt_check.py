"""What apt is about to install, and whether there is a patched source for it: no I/O.

apt tells it before it runs dpkg: ``DPkg::Pre-Install-Pkgs``, protocol 3, see apt.conf(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuguard.core.upgrade import Change, Upgrade

#: The one exit status that stops apt. No interpreter, shell or signal ends with it.
REFUSED = 99
#: Set to ``never``: apt is not asked about. The maintenance window sets it, it looks itself.
ENVIRONMENT = "GPUGUARD_APT_CHECK"

#: Packages about which gpuguard is asked at all; shell patterns.
CHECKED_PACKAGES = (
    "linux-image-*",
    "linux-headers-*",
    "proxmox-kernel-*",
    "proxmox-headers-*",
    "pve-kernel-*",
    "pve-headers-*",
    "nvidia-*",
    "libnvidia-*",
    "cuda-drivers*",
)

_OPERATIONS = ("<", ">", "=", "-")
_FIELDS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """One reason against the transaction, and what to do about it."""

    message: str
    remedy: str


def expression(patterns: Iterable[str] = CHECKED_PACKAGES) -> str:
    """The patterns as one extended regular expression on a word, for sed(1)."""
    return "|".join(re.escape(p).replace(r"\-", "-").replace(r"\*", "[^ ]*") for p in patterns)


def parse_packages(text: str) -> Upgrade:
    """Lines of protocol 3: NAME OLD OLD-ARCH OLD-MA < NEW NEW-ARCH NEW-MA ACTION."""
    changes: dict[str, Change] = {}
    for line in text.splitlines():
        words = line.split(" ", _FIELDS - 1)
        if len(words) == _FIELDS and words[4] in _OPERATIONS:
            name, old, new = words[0], words[1], words[5]
            changes[name] = Change(name=name, old=_version(old), new=_version(new))
    return Upgrade(changes=tuple(changes.values()))


def objections(
    upgrade: Upgrade,
    *,
    driver: str | None,
    source: Sequence[tuple[str, str]],
    headers: Iterable[str],
) -> tuple[Objection, ...]:
    """What speaks against it.

    Args:
        upgrade: what apt would do.
        driver: version that will be installed afterwards; None: it is not known.
        source: what is wrong with the source for that version: message and remedy of each.
        headers: releases whose headers are installed already.
    """
    found: list[Objection] = []
    new = upgrade.new_kernels
    what = _subject(upgrade, driver)
    if what is not None:
        found += [
            Objection(message=f"{what}: {message}", remedy=remedy) for message, remedy in source
        ]
    lacking = [r for r in new if not upgrade.has_headers(r) and r not in set(headers)]
    for release in lacking:
        found.append(
            Objection(
                message=f"kernel {release} comes without its headers",
                remedy=f"install linux-headers-{release} with it",
            )
        )
    return tuple(found)


def _subject(upgrade: Upgrade, driver: str | None) -> str | None:
    if upgrade.driver_version is not None:
        return f"there is no patched source for driver {upgrade.driver_version}"
    kernels = (*upgrade.new_kernels, *upgrade.renewed_kernels)
    if not kernels:
        return None
    of = f" of driver {driver}" if driver else ""
    return f"the patched modules{of} cannot be built for kernel {', '.join(kernels)}"


def _version(word: str) -> str | None:
    return None if word == "-" else word
