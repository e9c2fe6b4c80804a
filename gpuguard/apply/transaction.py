"""Carry actions out so that a host is never left in between.

The undo of a step reaches the disk before the step starts. Any failure, signal or
``kill -9`` ends, at once or at the next start, in exactly the old state or, once the
commit mark is on disk, in exactly the new one.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpuguard.apply.actions import (
    Action,
    CheckInitramfs,
    CheckResolved,
    Depmod,
    PutFile,
    RebuildInitramfs,
    RemoveFile,
)
from gpuguard.apply.backups import discard
from gpuguard.apply.execute import DEPMOD_OUTPUTS, execute
from gpuguard.apply.journal import Journal, JournalState
from gpuguard.apply.objects import ObjectStore
from gpuguard.apply.undo import (
    NoFolderBefore,
    NothingBefore,
    Sweep,
    Undo,
    is_back,
    look,
    put_back,
    sweep,
)
from gpuguard.errors import GpuguardError, RollbackError, StateError
from gpuguard.host import Host
from gpuguard.host.signals import HeldSignals
from gpuguard.state import module_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What the start found and did about an interrupted change."""

    verb: str
    release: str
    started: str
    outcome: str  # "old state", "new state"


def apply(
    actions: Sequence[Action],
    host: Host,
    *,
    verb: str,
    release: str,
    started: str,
    backup: str | None,
) -> None:
    """Carry out the actions in order; on any failure put back what was begun.

    Raises:
        GpuguardError: what the failing action said; the host is as before.
        RollbackError: it failed, and so did putting back; the journal stays.
    """
    journal, store = Journal(host), ObjectStore(host)
    with HeldSignals() as held:
        journal.begin(verb, release, started, backup)
        try:
            held.let_go()
            for action in actions:
                for undo in undos_of(action, host, store):
                    journal.push(undo)
                execute(action, host)
            with HeldSignals():
                journal.commit()
        except BaseException as error:
            with HeldSignals():  # people press Ctrl-C twice
                recover(host)
            if isinstance(error, OSError):
                raise StateError(
                    f"{error.filename or 'writing'}: {error.strerror}",
                    code="disk-full" if error.errno == errno.ENOSPC else "write-failed",
                    hint="the host is as it was before; mend the disk and try again",
                ) from error
            raise
    with HeldSignals():
        _finish(host, journal)


def recover(host: Host) -> Recovery | None:
    """Finish what an interrupted change left: undo it, or clean up after its commit.

    Returns None if there was nothing to recover. Idempotent.

    Raises:
        RollbackError: the old state cannot be restored; the journal stays.
        StateError: the journal cannot be read.
    """
    journal = Journal(host)
    state = journal.read()
    if state is None:
        return None
    if not state.committed:
        _undo_all(state, host)
        if state.backup is not None:
            discard(host, state.backup)  # nothing changed: nothing to go back to
    _finish(host, journal, state)
    return Recovery(
        verb=state.verb,
        release=state.release,
        started=state.started,
        outcome="new state" if state.committed else "old state",
    )


def undos_of(action: Action, host: Host, store: ObjectStore) -> Iterator[Undo]:
    """How everything that an action may touch looks now."""
    match action:
        case PutFile() | RemoveFile():
            yield from _missing_folders(action.path, host)
            yield Sweep(path=str(PurePosixPath(action.path).parent))
            yield look(action.path, host, store)
        case Depmod():
            tree = module_tree(action.release)
            yield Sweep(path=tree)
            for name in DEPMOD_OUTPUTS:
                yield look(f"{tree}/{name}", host, store)
        case RebuildInitramfs():
            for path in (action.path, f"{action.path}.new", f"{action.path}.dpkg-bak"):
                yield look(path, host, store)
        case CheckResolved() | CheckInitramfs():
            pass


def _missing_folders(path: str, host: Host) -> Iterator[NoFolderBefore]:
    parents = [str(parent) for parent in PurePosixPath(path).parents]
    for parent in reversed(parents):  # outermost first, so that undoing removes it last
        if not host.path(parent).exists():
            yield NoFolderBefore(path=parent)


def _undo_all(state: JournalState, host: Host) -> None:
    store = ObjectStore(host)
    problems: list[str] = []
    backwards = list(reversed(state.undos))
    for undo in backwards:
        # What only takes away comes first, and again in its turn: on a full disk it makes the
        # room that putting back needs.
        if isinstance(undo, NothingBefore | Sweep):
            with suppress(OSError):
                put_back(undo, host, store)
    for undo in backwards:
        try:
            put_back(undo, host, store)
        except (GpuguardError, OSError) as error:
            problems.append(f"{undo.path}: {error}")
    problems += [f"{u.path}: not as before" for u in _first_looks(state) if not is_back(u, host)]
    if problems:
        raise RollbackError(
            f"the {state.verb} of {state.release} was interrupted and cannot be undone",
            hint="mend the cause below and run gpuguard again: the journal is kept",
            detail="\n".join(dict.fromkeys(problems)),
        )


def _first_looks(state: JournalState) -> list[Undo]:
    # A path that several actions touch is back when it looks as before the first of them.
    first: dict[tuple[str, bool], Undo] = {}
    for undo in state.undos:
        first.setdefault((undo.path, isinstance(undo, Sweep | NoFolderBefore)), undo)
    return list(first.values())


def _finish(host: Host, journal: Journal, state: JournalState | None = None) -> None:
    state = state or journal.read()
    for undo in state.undos if state else ():
        if isinstance(undo, Sweep):
            sweep(undo, host)
    journal.clear()
