"""What can be done to a host, as data. ``transaction.apply`` carries actions out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuguard.state import DEPMOD_DIR

#: Folders that packages bring: they stay, also when they are empty.
PACKAGES_FOLDERS = frozenset(
    {
        DEPMOD_DIR,
        "/etc/apt/apt.conf.d",
        "/etc/default/grub.d",
        "/etc/kernel/header_postinst.d",
        "/etc/kernel/postinst.d",
        "/etc/kernel/postrm.d",
        "/etc/systemd/system",
        "/etc/tmpfiles.d",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutFile:
    """Write a file atomically; ``source`` is a file that this process can open, or bytes."""

    path: str
    source: Path | bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class PutLink:
    """Make a symlink, or make it lead elsewhere, in one step."""

    path: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveFile:
    """Remove a file or link and, if empty then and not a package's, its folder."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Depmod:
    """Recompute which module files modprobe loads for one release."""

    release: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildInitramfs:
    """Rebuild the initial RAM disk of one release (never of all)."""

    release: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedModule:
    """What must resolve for one canonical name; ``sha256`` is of the file as it lies there."""

    name: str
    build_id: str | None
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResolved:
    """Ask modprobe who wins, and compare the winner byte for byte."""

    release: str
    modules: tuple[ExpectedModule, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckInitramfs:
    """Look inside the rebuilt image: it must carry what modprobe would load."""

    release: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBootMenu:
    """Let the boot loader's own tool write its menu anew (``update-grub``)."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckNextKernel:
    """Look what would boot next: it must be one of these."""

    releases: tuple[str, ...]


Action = (
    PutFile
    | PutLink
    | RemoveFile
    | Depmod
    | RebuildInitramfs
    | CheckResolved
    | CheckInitramfs
    | UpdateBootMenu
    | CheckNextKernel
)
