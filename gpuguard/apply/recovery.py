"""Undo an interrupted change, at once or at the next start, which may be days later.

What apt, DKMS or a person has done since is theirs: a file that is neither as it was nor as
the change made it stays. What depmod and the initramfs tools make of the files comes back
byte for byte if nobody has changed what they read, and is made anew otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from gpuguard.apply.backups import discard
from gpuguard.apply.journal import Journal, JournalState
from gpuguard.apply.leftover import end_left_over
from gpuguard.apply.undo import Sweep, Wrote, sweep
from gpuguard.apply.undoing import undo_all
from gpuguard.host import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What the start found and did about an interrupted change.

    ``notes``: what is not as before, because others have changed it meanwhile.
    """

    verb: str
    release: str
    started: str
    outcome: str  # "old state", "new state"
    notes: tuple[str, ...] = ()


def recover(
    host: Host, *, made: Iterable[Wrote] = (), is_committed: bool | None = None
) -> Recovery | None:
    """Finish what an interrupted change left: undo it, or clean up after its commit.

    Args:
        host: where to look.
        made: what the caller knows about paths beyond the journal.
        is_committed: whether it was, for a caller who knows better than the journal.

    Returns None if there was nothing to recover. Idempotent. Call it only while no package
    tool is at work.

    Raises:
        RollbackError: the old state cannot be restored; the journal stays.
        StateError: the journal cannot be read.
        LockHeldError: a program that the change had started cannot be ended.
    """
    journal = Journal(host)
    if is_committed is False:
        with suppress(OSError):  # then only this process knows
            journal.retract()
    state = journal.read()
    if state is None:
        return None
    end_left_over(host)
    committed = state.committed if is_committed is None else is_committed
    notes: tuple[str, ...] = ()
    if not committed:
        notes = undo_all(state, host, made)
        if state.backup is not None:
            discard(host, state.backup)  # nothing changed: nothing to go back to
    finish(host, journal, state)
    return Recovery(
        verb=state.verb,
        release=state.release,
        started=state.started,
        outcome="new state" if committed else "old state",
        notes=notes,
    )


def finish(host: Host, journal: Journal, state: JournalState | None = None) -> None:
    """Drop temporary files and the journal of a change that is complete or undone."""
    state = state or journal.read()
    for undo in state.undos if state else ():
        if isinstance(undo, Sweep):
            sweep(undo, host)
    end_left_over(host)
    journal.clear()
