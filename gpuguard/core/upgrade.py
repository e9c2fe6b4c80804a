"""What apt would change, and whether a maintenance window may let it: decided without I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gpuguard.core.package_names import kernel_kind
from gpuguard.core.packages import Package
from gpuguard.core.releases import release_key

#: What ends half-done packages: on hold, apt could not.
MENDING = """\
sudo gpuguard unhold
sudo dpkg --configure -a; sudo apt-get --fix-broken install
sudo gpuguard hold"""
_UNAVAILABLE, _CONFIG = 69, 78  # sysexits(3)
# Inst NAME [OLD] (NEW ARCHIVE, ARCHIVE [ARCH]) []
_INSTALL = re.compile(
    r"^Inst (?P<name>\S+)(?: \[(?P<old>[^\]]*)\])? \((?P<new>\S+) .*\[(?P<arch>[^\]\s]+)\]\)"
)
_REMOVE = re.compile(r"^(?:Remv|Purg) (?P<name>\S+)(?: \[(?P<old>[^\]]*)\])?")
# A meta-package's number has two parts at most: linux-image-6.1-amd64
_KERNEL = re.compile(
    r"(?:linux-image|proxmox-kernel|pve-kernel)-(?:unsigned-)?"
    r"(?P<release>\d+\.\d+\.\d+[\w.+~-]*?)(?:-unsigned|-signed)?"
)
_NO_KERNEL = re.compile(r".*-(?:dbg|dbgsym)")
_HEADERS = ("linux-headers-{}", "proxmox-headers-{}", "pve-headers-{}")
#: Whose version is the userland's; ``probes.driver`` reads the same ones once installed.
_USERLAND = re.compile(
    r"(?:libnvidia-ml1|libnvidia-compute|nvidia-utils)(?:-\d+)?(?:-server|-open)*"
)
_DRIVER_VERSION = re.compile(r"\d{2,}\.\d+(?:\.\d+)?")
_SPECIFICATION = re.compile(r"[a-z0-9][a-z0-9+.-]+(?::[a-z0-9-]+)?(?:=[A-Za-z0-9.+:~-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One package; ``old`` None: it is new, ``new`` None: it would be removed.

    ``name`` is as apt prints it: ``libc6``, and ``libc6:i386`` for another architecture.
    """

    name: str
    old: str | None
    new: str | None

    @property
    def is_removal(self) -> bool:
        """True if the package would be gone."""
        return self.new is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to ask apt for. ``foreign``: left out, because somebody else holds them."""

    names: tuple[str, ...]
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """What apt would do: ``requested`` is what it is asked for, ``changes`` all that follows."""

    requested: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    @property
    def new_kernels(self) -> tuple[str, ...]:
        """Releases that are not installed yet, oldest first."""
        return self._kernels(lambda change: change.old is None and change.new is not None)

    @property
    def renewed_kernels(self) -> tuple[str, ...]:
        """Releases that are installed and come in another version of their package."""
        return self._kernels(lambda change: change.old is not None and change.new is not None)

    @property
    def removed_kernels(self) -> tuple[str, ...]:
        """Releases that would go away."""
        return self._kernels(lambda change: change.is_removal)

    @property
    def driver_version(self) -> str | None:
        """The userland's new version; None: the driver does not change."""
        for change in self.changes:
            if change.new and _USERLAND.fullmatch(change.name):  # ours: no other architecture's
                upstream = change.new.rpartition(":")[2].partition("-")[0]
                if match := _DRIVER_VERSION.match(upstream):
                    return match[0]
        return None

    @property
    def versions(self) -> Mapping[str, str]:
        """Package -> version, of everything that would be installed."""
        return {c.name: c.new for c in self.changes if c.new is not None}

    def has_headers(self, release: str) -> bool:
        """True if headers for this release would be installed, too."""
        return any(name.format(release) in self.versions for name in _HEADERS)

    def _kernels(self, is_wanted: Callable[[Change], bool]) -> tuple[str, ...]:
        found = {kernel_release(change.name) for change in self.changes if is_wanted(change)}
        return tuple(sorted((r for r in found if r is not None), key=release_key))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a window does not open; nothing was changed."""

    code: str
    message: str
    hint: str
    exit_status: int = _UNAVAILABLE
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The patched modules for one kernel, tried before anything is installed.

    ``is_required``: the upgrade is refused if they cannot be built. ``refusal`` None: they were
    built, in ``seconds`` (None: they had been built before), or not tried at all.
    """

    release: str
    is_required: bool
    refusal: Refusal | None = None
    was_built: bool = False
    seconds: float | None = None


def parse_simulation(text: str) -> tuple[Change, ...]:
    """The changes in the output of ``apt-get -s``, in its order; ``Conf`` lines say nothing new."""
    found: dict[str, Change] = {}
    for line in text.splitlines():
        if match := _INSTALL.match(line):
            name = match["name"]
            gone = found.pop(name, None)  # apt may remove first what it then installs again
            old = match["old"] or (gone.old if gone is not None else None)
            found[name] = Change(name=name, old=old, new=match["new"])
        elif match := _REMOVE.match(line):
            found[match["name"]] = Change(name=match["name"], old=match["old"] or "", new=None)
    return tuple(found.values())


def kernel_release(package: str) -> str | None:
    """``6.1.0-50-amd64`` of ``linux-image-6.1.0-50-amd64``; None for metas and all else."""
    match = _KERNEL.fullmatch(package.partition(":")[0])
    return match["release"] if match and not _NO_KERNEL.fullmatch(package) else None


def is_specification(word: str) -> bool:
    """True for ``NAME``, ``NAME:ARCH`` and ``NAME=VERSION``: what is safe to hand to apt.

    Not with ``+`` or ``-`` at the end, which apt takes for "install" and "remove".
    """
    return _SPECIFICATION.fullmatch(word) is not None and not word.endswith(("+", "-"))


def choose(
    packages: Mapping[str, Package], *, is_meant: Callable[[str], bool], ours: AbstractSet[str]
) -> Choice:
    """The installed packages that a window upgrades: those that are meant.

    Args:
        packages: what dpkg knows.
        is_meant: the policy on a plain name.
        ours: holds that gpuguard has set; every other hold is somebody else's.
    """
    meant = sorted(
        key for key, package in packages.items() if not package.is_gone and is_meant(package.name)
    )
    foreign = tuple(key for key in meant if packages[key].is_held and key not in ours)
    return Choice(names=tuple(key for key in meant if key not in foreign), foreign=foreign)


def reduce(requested: Sequence[str], changes: Iterable[Change]) -> tuple[str, ...]:
    """What has to be asked for, with the version that was looked at: the rest is new already."""
    versions = {change.name: change.new for change in changes if change.new is not None}
    found = []
    for word in requested:
        name = word.partition("=")[0]
        if name in versions:
            found.append(f"{name}={versions[name]}")
    return tuple(found)


def without_holds(status: str, ours: AbstractSet[str]) -> str:
    """The status file of dpkg as it will be once our holds are lifted; others' stay."""
    stanzas = status.split("\n\n")
    for index, stanza in enumerate(stanzas):
        if "\nStatus: hold " not in stanza:
            continue
        name = re.search(r"^Package: (\S+)", stanza, re.MULTILINE)
        architecture = re.search(r"^Architecture: (\S+)", stanza, re.MULTILINE)
        if name and {name[1], f"{name[1]}:{architecture[1] if architecture else ''}"} & ours:
            stanzas[index] = stanza.replace("\nStatus: hold ", "\nStatus: install ", 1)
    return "\n\n".join(stanzas)


def removal_refusals(upgrade: Upgrade, is_meant: Callable[[str], bool]) -> Iterator[Refusal]:
    """Packages that are none of the window's business would be removed."""
    others = [
        c.name for c in upgrade.changes if c.is_removal and not is_meant(c.name.partition(":")[0])
    ]
    if others:
        yield Refusal(
            code="upgrade-removes",
            message=f"apt would remove {', '.join(others)}, which this window is not about",
            hint="see why: apt-get -s install "
            f"{' '.join(upgrade.requested)}\nif that is what you want: --allow-removals",
        )


def headers_refusals(upgrade: Upgrade, *, named: bool = False) -> Iterator[Refusal]:
    """A new kernel would come without the headers that its modules are compiled against.

    ``named``: somebody has named the packages, so the headers may just not be among them.
    """
    for release in upgrade.new_kernels:
        if not upgrade.has_headers(release):
            yield Refusal(
                code="upgrade-without-headers",
                message=f"{release} would be installed without its headers: no patched modules",
                hint=_headers_hint(release, named=named),
            )


def _headers_hint(release: str, *, named: bool) -> str:
    kind = kernel_kind(f"linux-image-{release}")
    flavour = kind[1] if kind else ""
    meta = f"linux-headers-{flavour}" if flavour else f"linux-headers-{release}"
    if named:
        return f"name {meta} as well, or run gpuguard upgrade without names"
    return f"install the headers' meta-package, so that they come along: apt-get install {meta}"


def driver_refusals(upgrade: Upgrade, configured: str | None) -> Iterator[Refusal]:
    """The configuration says which driver version to build, and apt would install another."""
    candidate = upgrade.driver_version
    if candidate is not None and configured not in (None, candidate):
        yield Refusal(
            code="driver-version-pinned",
            message=f"driver_version is {configured} in the configuration, "
            f"apt would install {candidate}",
            hint="take driver_version out of the configuration, or set it to the new version",
            exit_status=_CONFIG,
        )


def kernels_to_try(
    upgrade: Upgrade, installed: Sequence[str], next_release: str | None
) -> tuple[Trial, ...]:
    """For which kernels the patched modules have to be tried, those first that decide.

    Args:
        upgrade: what apt would do.
        installed: releases that are looked after, oldest first.
        next_release: what would boot now.
    """
    new = upgrade.new_kernels
    stay = [release for release in installed if release not in (*upgrade.removed_kernels, *new)]
    if upgrade.driver_version is None:
        stay = [release for release in stay if release in upgrade.renewed_kernels]
    # The newest boots next, unless the boot default is an older one by somebody's choice.
    follows_newest = bool(installed) and next_release == installed[-1]
    required = {*new, *(() if new and follows_newest else (next_release,))}
    trials = [
        Trial(release=release, is_required=release in required)
        for release in (*reversed(new), *reversed(stay))
    ]
    return tuple(sorted(trials, key=lambda trial: not trial.is_required))
