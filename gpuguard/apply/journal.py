"""The undo of the change under way, on disk before the change.

JSON lines: a header, undo records in the order in which they were pushed, and ``commit``
as the point of no return. A torn last line is a push that never took effect: its step had
not begun. Schema 1. A line that could not be written whole and durably is taken back.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gpuguard.apply.undo import Undo, from_json, to_json
from gpuguard.errors import StateError
from gpuguard.host import Host
from gpuguard.host.files import fsync_dir, make_dirs
from gpuguard.state import JOURNAL_FILE

_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalState:
    """What a journal says: which change, how to undo it, and whether it was finished."""

    verb: str
    release: str
    started: str
    backup: str | None
    undos: tuple[Undo, ...] = field(default=())
    committed: bool = False


class Journal:
    """At most one change is under way; the lock guarantees it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.is_committed = False  # by this very object

    def begin(self, verb: str, release: str, started: str, backup: str | None) -> None:
        """Open the journal; fails if there is one, which ``recover`` must deal with first."""
        header = {
            "schema": _SCHEMA,
            "verb": verb,
            "release": release,
            "started": started,
            "backup": backup,
        }
        path = self._host.path(JOURNAL_FILE)
        make_dirs(path.parent)
        if self.read() is not None:
            raise StateError("a journal of an earlier change is still there", code="journal-there")
        path.unlink(missing_ok=True)
        try:
            self._append(header)
        except StateError:
            path.unlink(missing_ok=True)  # torn, and nothing was begun
            raise
        fsync_dir(path.parent)

    def push(self, undo: Undo) -> None:
        """Record the undo of a step durably, before the step."""
        self._append(to_json(undo))

    def commit(self) -> None:
        """The change is complete: from here on a crash ends in the new state."""
        self._append({"op": "commit"})
        self.is_committed = True

    def retract(self) -> None:
        """Take back a mark of which fsync could not say that it is on disk.

        Raises:
            OSError: the journal cannot be written either.
        """
        path = self._host.path(JOURNAL_FILE)
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line != _line({"op": "commit"})]
        if kept != lines:
            self._host.replace_file(JOURNAL_FILE, b"".join(kept))

    def clear(self) -> None:
        """Drop the journal."""
        self._host.remove_file(JOURNAL_FILE)

    def read(self) -> JournalState | None:
        """The journal of an interrupted change; None if there is none, or not one whole line.

        Raises:
            StateError: it is there and cannot be understood; nothing may be changed then.
        """
        path = self._host.path(JOURNAL_FILE)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(f"{error.strerror}") from error
        documents = _documents(content)
        if not documents:
            return None
        header, *rest = documents
        if header.get("schema") != _SCHEMA:
            raise _unreadable(f"schema {header.get('schema')} is not {_SCHEMA}")
        return JournalState(
            verb=str(header.get("verb")),
            release=str(header.get("release")),
            started=str(header.get("started")),
            backup=header.get("backup"),
            undos=_undos(rest),
            committed=any(d.get("op") == "commit" for d in rest),
        )

    def _append(self, document: dict[str, Any]) -> None:
        path = self._host.path(JOURNAL_FILE)
        line = _line(document)
        try:
            # readable by all: `plan` and `status` need no root to see that a change is pending
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                _write_durably(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StateError(
                f"cannot write {JOURNAL_FILE}: {error.strerror}",
                code="journal-unwritable",
                hint="make room or make it writable; without a journal nothing is changed",
            ) from error


def _undos(documents: list[dict[str, Any]]) -> tuple[Undo, ...]:
    try:
        return tuple(from_json(d) for d in documents if d.get("op") != "commit")
    except ValueError as error:
        raise _unreadable(str(error)) from error


def _line(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"


def _write_durably(descriptor: int, line: bytes) -> None:
    size = os.fstat(descriptor).st_size
    try:
        _write_all(descriptor, line)
        os.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        raise


def _write_all(descriptor: int, data: bytes) -> None:
    # On a disk that is filling up a write may take a part; the next one says ENOSPC.
    while data:
        data = data[os.write(descriptor, data) :]


def _documents(content: bytes) -> list[dict[str, Any]]:
    lines = content.split(b"\n")
    complete, torn = lines[:-1], lines[-1]
    documents = []
    for line in complete:
        try:
            document = json.loads(line)
        except ValueError as error:
            raise _unreadable(str(error)) from error
        if not isinstance(document, dict):
            raise _unreadable("a line is not an object")
        documents.append(document)
    del torn  # never took effect
    return documents


def _unreadable(why: str) -> StateError:
    return StateError(
        f"{JOURNAL_FILE} cannot be understood: {why}",
        code="journal-unreadable",
        hint=(
            "nothing was changed. See gpuguard(1), RECOVERY BY HAND; when the host is as you "
            f"want it, move {JOURNAL_FILE} away"
        ),
    )
