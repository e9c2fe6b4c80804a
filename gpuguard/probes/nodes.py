"""Loaded modules of the driver, and the device nodes that programs open."""

from __future__ import annotations

from collections.abc import Iterable

from gpuguard.core.doctor_facts import CardFacts, Unread
from gpuguard.core.facts import MODULE_NAMES
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import real_path

_SHARED = ("nvidiactl", "nvidia-uvm")


def probe_loaded_modules(host: Host) -> tuple[str, ...] | Unread:
    """Canonical names of the driver's modules in ``/sys/module``."""
    try:
        if real_path(host, "/sys/module") is None:
            return Unread("/sys/module", "there is no such folder")
        return tuple(
            name
            for name in MODULE_NAMES
            if real_path(host, f"/sys/module/{name.replace('-', '_')}") is not None
        )
    except ProbeError as error:
        return Unread("/sys/module", error.message)


def probe_missing_nodes(host: Host, cards: Iterable[CardFacts]) -> tuple[str, ...] | Unread:
    """Which of ``nvidiactl``, ``nvidia-uvm`` and one node per card are not in /dev.

    A card's node is ``/dev/nvidia<minor>``; the minor is the driver's own number.
    """
    minors = [f"nvidia{card.minor}" for card in cards if card.minor is not None]
    try:
        if real_path(host, "/dev") is None:
            return Unread("/dev", "there is no such folder")
        return tuple(
            f"/dev/{name}"
            for name in (*minors, *_SHARED)
            if real_path(host, f"/dev/{name}") is None
        )
    except ProbeError as error:
        return Unread("/dev", error.message)
