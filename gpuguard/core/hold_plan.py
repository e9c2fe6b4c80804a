"""What ``hold``, ``unhold``, a window and an automatic run change: selections, and the ledger.

Each plan has two ledgers. ``during`` is written before dpkg is told anything: all that changes
counts as lifted in it, so whatever a crash leaves is held again by the next run. ``after``
follows once dpkg has been asked what it took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuguard.core.holds import HoldFacts, HoldPolicy, Ledger, LedgerEntry, hold_state
from gpuguard.core.packages import Package, key_of
from gpuguard.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldPlan:
    """``hold`` and ``release``: names whose selection changes. ``foreign``: left to others.

    ``restored``: those of ``hold`` that were ours before and had lost their hold.
    """

    before: Ledger
    during: Ledger
    after: Ledger
    hold: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing to tell dpkg, and nothing to write down."""
        return not (self.hold or self.release) and self.before == self.after


def plan_hold(
    facts: HoldFacts, policy: HoldPolicy, names: Sequence[str] | None, now: str
) -> HoldPlan:
    """Hold what the policy means, or these besides; what others hold stays theirs.

    Raises:
        UsageError: one of the names is not installed; nothing is to be changed then.
    """
    book = facts.book
    if names is not None:
        names = [key_of(name, facts.packages) for name in names]
        _refuse_absent(facts.packages, names)
        book = replace(book, exempt=_without(book.exempt, names))
        targets = {*names, *book.lifted}
        entries = _entries(facts, book, targets, now, asked=names, accept=True)
        return _to_hold(facts, book, entries, targets)
    book = replace(book, active=True, exempt=())
    wanted = policy.wanted(facts.packages)
    asked = {name for name, entry in book.packages.items() if entry.asked}
    targets = {*wanted, *asked}
    entries = _entries(facts, book, targets, now, accept=True)
    kept = {name: entry for name, entry in entries.items() if name in targets}
    return _to_hold(facts, book, kept, targets)


def plan_again(facts: HoldFacts, policy: HoldPolicy, now: str) -> HoldPlan:
    """Hold again what a window or a crash lifted; and, if enforced, all that should be held.

    A version that changed while a window was open is what was wanted: it is written down. One
    that changed under a hold stays to be seen.
    """
    book = facts.book
    targets = {*book.lifted}
    if policy.enforce or book.lifted:
        state = hold_state(facts, policy)
        targets |= {*state.drifted, *state.missing}
    return _to_hold(facts, book, _entries(facts, book, targets, now), targets)


def plan_unhold(facts: HoldFacts, names: Sequence[str] | None) -> HoldPlan:
    """Lift all of ours and stop holding, or these of ours only; those are then exempt.

    Raises:
        UsageError: one of the names is held by somebody else, or by nobody.
    """
    book = facts.book
    if names is None:
        held = [name for name, package in facts.packages.items() if package.is_held]
        foreign = [name for name in held if name not in book.packages]
        return _plan(facts, book, Ledger(), release=book.packages, foreign=foreign)
    names = [key_of(name, facts.packages) for name in names]
    _refuse_others(facts, names)
    exempt = {*book.exempt, *names} if book.active else book.exempt
    after = replace(
        book,
        packages={n: entry for n, entry in book.packages.items() if n not in names},
        lifted=_without(book.lifted, names),
        exempt=tuple(sorted(exempt)),
    )
    return _plan(facts, book, after, release=set(names))


def plan_lift(facts: HoldFacts) -> HoldPlan:
    """Lift all of ours for a window; the ledger keeps them as ours and lifted."""
    book = facts.book
    mine = {n for n in book.packages if n in facts.packages}
    after = replace(book, lifted=tuple(sorted({*book.lifted, *mine})))
    return _plan(facts, book, after, release=mine)


def _entries(
    facts: HoldFacts,
    book: Ledger,
    targets: Iterable[str],
    now: str,
    *,
    asked: Sequence[str] = (),
    accept: bool = False,
) -> dict[str, LedgerEntry]:
    """The ledger's lines: those of packages that are still there, and new ones.

    ``accept``: what is installed now is what should be, for all targets and not only for those
    that a window lifted.
    """
    entries = {n: e for n, e in book.packages.items() if _is_there(facts.packages, n)}
    for name in targets:
        if not _is_there(facts.packages, name):
            continue
        package, old = facts.packages[name], book.packages.get(name)
        if old is None and package.is_held:
            continue  # somebody else's
        as_installed = old is None or accept or name in book.lifted
        entries[name] = LedgerEntry(
            since=old.since if old else now,
            version=package.version if old is None or as_installed else old.version,
            asked=name in asked or (old is not None and old.asked),
        )
    return entries


def _to_hold(
    facts: HoldFacts, book: Ledger, entries: Mapping[str, LedgerEntry], targets: Iterable[str]
) -> HoldPlan:
    after = replace(book, packages=entries, lifted=())
    hold = {n for n in targets if n in entries and not facts.packages[n].is_held}
    release = {n for n in facts.book.packages if n not in entries}
    foreign = {n for n in targets if n not in entries and _is_there(facts.packages, n)}
    return _plan(facts, facts.book, after, hold=hold, release=release, foreign=foreign)


def _plan(
    facts: HoldFacts,
    before: Ledger,
    after: Ledger,
    *,
    hold: Iterable[str] = (),
    release: Iterable[str] = (),
    foreign: Iterable[str] = (),
) -> HoldPlan:
    to_hold = tuple(sorted(hold))
    to_release = tuple(sorted(n for n in release if _is_held(facts.packages, n)))
    in_doubt = {*before.lifted, *after.lifted, *to_hold, *to_release}
    during = Ledger(
        active=before.active or after.active,
        packages={**after.packages, **before.packages},
        lifted=tuple(sorted(in_doubt & {*before.packages, *after.packages})),
        exempt=before.exempt,
    )
    return HoldPlan(
        before=before,
        during=during,
        after=after,
        hold=to_hold,
        release=to_release,
        foreign=tuple(sorted(foreign)),
        restored=tuple(n for n in to_hold if n in before.packages),
    )


def _is_there(packages: Mapping[str, Package], name: str) -> bool:
    return name in packages and not packages[name].is_gone


def _is_held(packages: Mapping[str, Package], name: str) -> bool:
    return name in packages and packages[name].is_held


def _without(names: Iterable[str], gone: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in gone)


def _refuse_absent(packages: Mapping[str, Package], names: Sequence[str]) -> None:
    if absent := [name for name in names if not _is_there(packages, name)]:
        raise UsageError(
            f"{', '.join(absent)}: not installed, so there is nothing to hold",
            code="package-not-installed",
            hint="names as dpkg -l and apt-mark showhold print them, without patterns",
        )


def _refuse_others(facts: HoldFacts, names: Sequence[str]) -> None:
    others = [n for n in names if n not in facts.book.packages]
    foreign = [name for name in others if _is_held(facts.packages, name)]
    if foreign:
        raise UsageError(
            f"{', '.join(foreign)}: not held by gpuguard but by somebody else; nothing was changed",
            code="hold-foreign",
            hint=f"if it is to go all the same: sudo apt-mark unhold {' '.join(foreign)}",
        )
    if others:
        raise UsageError(
            f"{', '.join(others)}: not on hold",
            code="not-held",
            hint="see: gpuguard holds",
        )
