"""Holds: what should be on hold, what is, whose it is, and what to change.

A hold is *ours* if the ledger says that gpuguard set it, else *foreign*: shown, never lifted.
Names are as apt-mark(8) prints them: ``libnvidia-compute:i386`` for a foreign architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuguard.core.package_names import (
    HELD_PACKAGES,
    NEVER_HELD_PACKAGES,
    kernel_kind,
    without_branch,
)
from gpuguard.core.packages import Package, name_matcher


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldPolicy:
    """Which packages are to be on hold once holding is active; shell patterns on names."""

    packages: tuple[str, ...] = HELD_PACKAGES
    exclude: tuple[str, ...] = NEVER_HELD_PACKAGES
    enforce: bool = True

    def wanted(self, packages: Mapping[str, Package]) -> tuple[str, ...]:
        """Those of the packages that are there and that the patterns mean."""
        is_meant, is_excluded = name_matcher(self.packages), name_matcher(self.exclude)
        return tuple(
            sorted(
                key
                for key, package in packages.items()
                if not package.is_gone and is_meant(package.name) and not is_excluded(package.name)
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One hold of ours: since when (RFC 3339), on which version; ``asked``: by name."""

    since: str
    version: str
    asked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Which holds are ours.

    ``active``: the policy is applied. ``lifted``: ours and just now not known to be on hold: a
    window is open, or a change was interrupted; they are to be held again. ``exempt``: the policy
    means them, and the operator lifted them by name.
    """

    active: bool = False
    packages: Mapping[str, LedgerEntry] = field(default_factory=dict)
    lifted: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Withheld:
    """An upgrade that a hold keeps away; ``since``: first seen by a run as root, None: just now.

    ``security``: it, or a version between, comes from a security archive.
    """

    name: str
    installed: str
    candidate: str
    security: bool
    since: str | None = None
    security_since: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WithheldRecord:
    """What the last look at apt's lists found; ``problem``: why it could not look."""

    looked: str
    packages: tuple[Withheld, ...] = ()
    lists_updated: str | None = None  # when apt's lists were fetched last
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldFacts:
    """What dpkg and our ledger say.

    ``problem``: why that could not be read; then nothing else counts. ``at_work``: a gpuguard
    is, so what is lifted is lifted on purpose. ``evidence``: package -> the last entry of apt's
    or dpkg's log that names it, for those that lost their hold or changed under it.
    """

    packages: Mapping[str, Package] = field(default_factory=dict)
    ledger: Ledger | None = None  # None: gpuguard never held anything here
    withheld: WithheldRecord | None = None
    evidence: Mapping[str, str] = field(default_factory=dict)
    at_work: bool = False
    problem: str | None = None

    @property
    def book(self) -> Ledger:
        """The ledger; where there is none, one without a line."""
        return self.ledger or Ledger()


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedOver:
    """A package of ours whose version changed outside a window, whether its hold is left or not.

    ``dpkg -i`` and ``apt-get install --allow-change-held-packages`` take the hold away, too. Once
    it is back, the version still tells.
    """

    name: str
    recorded: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ineffective:
    """A hold that keeps nothing back: why, and what to hold instead (empty: nothing).

    ``renamed``: package -> version of what a transitional one leads to; a hold on it ends with its
    next name, a pin by version does not.
    """

    name: str
    reason: str
    instead: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldState:
    """Policy, packages, selections and ledger compared; all names sorted.

    ``held`` are all on hold, ``ours`` and ``foreign`` together. ``drifted``: ours, and the hold
    is gone. ``missing``: meant by the policy, never held by us, not on hold.
    """

    active: bool = False
    wanted: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    drifted: tuple[str, ...] = ()
    lifted: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()
    ineffective: tuple[Ineffective, ...] = ()
    stepped_over: tuple[SteppedOver, ...] = ()
    withheld: tuple[Withheld, ...] | None = None  # None: nobody has looked, or could not
    problem: str | None = None


def hold_state(facts: HoldFacts, policy: HoldPolicy) -> HoldState:
    """Compare what is with what should be."""
    if facts.problem is not None:
        return HoldState(problem=facts.problem)
    packages, book = facts.packages, facts.book
    wanted = tuple(n for n in policy.wanted(packages) if n not in book.exempt)
    held = tuple(sorted(name for name, package in packages.items() if package.is_held))
    present = {n for n, package in packages.items() if not package.is_gone}
    lifted = tuple(sorted(n for n in book.lifted if n in present and n not in held))
    ours = tuple(name for name in held if name in book.packages)
    return HoldState(
        active=book.active,
        wanted=wanted,
        held=held,
        ours=ours,
        foreign=tuple(name for name in held if name not in book.packages),
        missing=tuple(
            n for n in wanted if book.active and n not in held and n not in book.packages
        ),
        drifted=tuple(
            name
            for name in sorted(book.packages)
            if name in present and name not in held and name not in lifted
        ),
        lifted=lifted,
        exempt=tuple(sorted(book.exempt)),
        ineffective=_ineffective(packages, held, policy),
        stepped_over=tuple(
            SteppedOver(
                name=name,
                recorded=book.packages[name].version,
                version=packages[name].version,
            )
            for name in sorted(book.packages)
            if name in present
            and name not in book.lifted
            and packages[name].version != book.packages[name].version
        ),
        withheld=_withheld(facts.withheld, packages),
    )


def _withheld(
    record: WithheldRecord | None, packages: Mapping[str, Package]
) -> tuple[Withheld, ...] | None:
    """What was recorded and still holds: the same version, and still on hold."""
    if record is None or record.problem is not None:
        return None
    return tuple(
        found
        for found in record.packages
        if (package := packages.get(found.name)) is not None
        and package.is_held
        and package.version == found.installed
    )


def _ineffective(
    packages: Mapping[str, Package], held: tuple[str, ...], policy: HoldPolicy
) -> tuple[Ineffective, ...]:
    free_metas = _free_kernel_metas(packages)
    family = set(policy.wanted(packages))
    found = []
    for name in held:
        package = packages[name]
        if package.is_gone:
            found.append(Ineffective(name=name, reason="it is removed, only its hold is left"))
        elif metas := free_metas.get(kernel_kind(package.name) or ("", "")):
            found.append(
                Ineffective(
                    name=name,
                    reason=f"{', '.join(metas)} is free and brings the next kernel all the same",
                    instead=metas,
                )
            )
        elif successors := _free_successors(name, package, packages, family):
            found.append(
                Ineffective(
                    name=name,
                    reason=f"it is transitional, and {', '.join(successors)} is free",
                    instead=successors,
                    renamed={other: packages[other].version for other in successors},
                )
            )
    return tuple(found)


def _free_kernel_metas(
    packages: Mapping[str, Package],
) -> dict[tuple[str, str], tuple[str, ...]]:
    """(kind, flavour) -> installed metas of it that are not on hold: ``linux-image-amd64``."""
    free: dict[tuple[str, str], list[str]] = {}
    for name, package in sorted(packages.items()):
        if package.is_gone or package.is_held or kernel_kind(package.name) is not None:
            continue
        for kind in dict.fromkeys(kernel_kind(other) for other in package.depends):
            if kind is not None:
                free.setdefault(kind, []).append(name)
    return {kind: tuple(names) for kind, names in free.items()}


def _free_successors(
    name: str, package: Package, packages: Mapping[str, Package], family: set[str]
) -> tuple[str, ...]:
    """What a held transitional package only leads to, and which is not on hold itself."""
    if not package.is_transitional:
        return ()
    _, colon, architecture = name.partition(":")
    leads_to = [other + colon + architecture for other in package.depends]
    if (renamed := without_branch(package.name)) is not None:
        leads_to.append(renamed + colon + architecture)
    return tuple(
        other
        for other in dict.fromkeys(leads_to)
        if other in family and not packages[other].is_held
    )
