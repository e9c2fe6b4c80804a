"""What is remembered of lanes: releases, which one is active, the switch under way, history.

A *release* is a lane as it was started: its content and the files made from it, byte for byte.
Once it was *promoted* it is never changed, so that going back needs neither the lane file nor the
same gpuguard. What was never promoted is nothing to go back to, however new it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from gpuguard.errors import LockHeldError, StateError
from gpuguard.host import Host
from gpuguard.host.files import fsync_dir, make_dirs
from gpuguard.host.flock import is_locked, open_lock, try_lock, wait_for_lock
from gpuguard.host.reading import list_dir, read_bytes
from gpuguard.serving.lane import Lane, lane_document
from gpuguard.serving.lane_file import kept_lane
from gpuguard.serving.machine import Outcome, Role, Step, Switch
from gpuguard.serving.render import RenderedFile, cache_dir
from gpuguard.state import LANE_STATE_DIR

ACTIVE_FILE = f"{LANE_STATE_DIR}/active.json"
SWITCH_FILE = f"{LANE_STATE_DIR}/switch.json"
HISTORY_FILE = f"{LANE_STATE_DIR}/history.jsonl"
PROMOTED_FILE = f"{LANE_STATE_DIR}/promoted.json"
RELEASES_DIR = f"{LANE_STATE_DIR}/releases"
SNAPSHOTS_DIR = f"{LANE_STATE_DIR}/snapshots"
WARM_DIR = f"{LANE_STATE_DIR}/warm"  # <lane id>: it was ready once, its kernels are compiled
BASELINE_FILE = f"{LANE_STATE_DIR}/baseline.json"
_LOCK_FILE = f"{LANE_STATE_DIR}/lock"
_SCHEMA = 1
_MAX_HISTORY = 1000
_KEEP_RELEASES = 20
_KEEP_SNAPSHOTS = 20
_KEEP_PROMOTED = 200
_PRIVATE_FILE = 0o600
_PRIVATE_DIR = 0o700
BUSY, BUSY_REMEDY = "another lane switch is under way", "gpuguard lane status shows how far it is"
_LOOKS = 4
_LOOK_AGAIN = 0.05


@dataclass(frozen=True, slots=True)
class Release:
    """A lane with the files that run it."""

    lane: Lane
    files: tuple[RenderedFile, ...]

    @property
    def release_id(self) -> str:
        """The lane's id."""
        return self.lane.lane_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """Which release serves. None: none does.

    ``last_good``: the one promoted last. ``previous``: the one before it, where ``rollback`` goes.
    """

    lane_id: str | None = None
    last_good: str | None = None
    previous: str | None = None
    since: str = ""
    gate: dict[str, Any] | None = None  # what the gate said when it was promoted

    @property
    def rollback_target(self) -> str | None:
        """Where ``gpuguard lane rollback`` goes."""
        return self.last_good if self.lane_id is None else self.previous


@contextmanager
def exclusive(host: Host, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of the lanes: one switch at a time.

    Args:
        host: where.
        wait: for the end of a switch that is under way, however long it takes.

    Raises:
        LockHeldError: a switch is under way, and it was not to be waited for.
        PrivilegeError, StateError: the lock file cannot be opened.
    """
    descriptor = open_lock(host, _LOCK_FILE)
    try:
        if wait:
            wait_for_lock(descriptor)
        else:
            _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    for attempt in range(_LOOKS):  # whoever only looks holds it for a moment, too
        if attempt:
            time.sleep(_LOOK_AGAIN)
        if try_lock(descriptor):
            return
    raise LockHeldError(
        BUSY,
        code="lane-busy",
        hint=BUSY_REMEDY,
    )


def is_switching(host: Host) -> bool | None:
    """True while a process holds the lock; None: it cannot be told."""
    return is_locked(host, _LOCK_FILE)


def read_active(host: Host) -> Active:
    """Which release serves.

    Raises:
        ProbeError, StateError: the record cannot be read.
    """
    document = _load(host, ACTIVE_FILE)
    if document is None:
        return Active()
    fields: dict[str, Any] = {name: document.get(name) for name in Active.__dataclass_fields__}
    return Active(**{**fields, "since": fields["since"] or ""})


def write_active(host: Host, active: Active) -> None:
    """Record which one serves; durable when this returns."""
    _save(host, ACTIVE_FILE, asdict(active))


def read_switch(host: Host) -> Switch | None:
    """The switch under way or interrupted; None: there is none.

    Raises:
        ProbeError, StateError: the record cannot be read.
    """
    document = _load(host, SWITCH_FILE)
    if document is None:
        return None
    try:
        known = {name: document[name] for name in Switch.__dataclass_fields__}
        lists = {key: tuple(value) for key, value in known.items() if isinstance(value, list)}
        outcome = known["outcome"]
        return Switch(
            **{
                **known,
                **lists,
                "step": Step(known["step"]),
                "role": Role(known["role"]),
                "outcome": None if outcome is None else Outcome(outcome),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(host, SWITCH_FILE, str(error)) from error


def write_switch(host: Host, switch: Switch) -> None:
    """Write the next step down; durable when this returns."""
    _save(host, SWITCH_FILE, asdict(switch))


def remove_switch(host: Host) -> None:
    """The switch is over."""
    host.remove_file(SWITCH_FILE)


def release_file(release_id: str) -> str:
    """Where a release is kept."""
    return f"{RELEASES_DIR}/{release_id}.json"


def write_release(host: Host, release: Release, *, anew: bool) -> None:
    """Keep a release.

    Args:
        host: where.
        release: what is about to be started.
        anew: also if it was promoted once. Else that stays as it is, with the files of its time.
    """
    file = release_file(release.release_id)
    if not anew and was_promoted(host, release.release_id) and read_bytes(host, file) is not None:
        return
    files = [dataclasses.asdict(one) for one in release.files]
    _save_private(host, file, {"lane": lane_document(release.lane), "files": files})


def read_release(host: Host, release_id: str) -> Release:
    """A release that was kept.

    Raises:
        StateError: it is not there, or not usable.
    """
    file = release_file(release_id)
    document = _load(host, file)
    if document is None:
        raise _unusable(host, file, "it is not there")
    try:
        files = tuple(RenderedFile(one["path"], one["text"]) for one in document["files"])
        return Release(kept_lane(document["lane"], file, release_id), files)
    except (KeyError, TypeError) as error:
        raise _unusable(host, file, f"lacks {error}") from error


def _promotions(host: Host) -> dict[str, str]:
    """Release -> when it was promoted, the last one last: clocks may be wrong, the order is not."""
    document = _load(host, PROMOTED_FILE)
    if document is None:  # a gpuguard before this record: what it had promoted is known from here
        active = read_active(host)
        known = (active.previous, active.last_good, active.lane_id)
        return {lane_id: active.since for lane_id in known if lane_id is not None}
    try:
        return {str(one["lane_id"]): str(one["when"]) for one in document["promoted"]}
    except (KeyError, TypeError) as error:
        raise _unusable(host, PROMOTED_FILE, f"lacks {error}") from error


def mark_promoted(host: Host, release_id: str, when: str) -> None:
    """A release has shown itself to be good; durable when this returns."""
    known = _promotions(host)
    known.pop(release_id, None)
    entries = [{"lane_id": key, "when": value} for key, value in known.items()]
    entries.append({"lane_id": release_id, "when": when})
    _save(host, PROMOTED_FILE, {"promoted": entries[-_KEEP_PROMOTED:]})


def was_promoted(host: Host, release_id: str) -> bool:
    """Whether a release was good once.

    Raises:
        ProbeError, StateError: the record cannot be read.
    """
    return release_id in _promotions(host)


def release_ids(host: Host) -> tuple[str, ...]:
    """Every release that is kept.

    Raises:
        ProbeError: the folder cannot be read.
    """
    files = list_dir(host, RELEASES_DIR)
    return tuple(sorted(file.removesuffix(".json") for file in files if file.endswith(".json")))


def find_release(host: Host, name: str) -> str | None:
    """The release of a lane that was promoted last; None: none ever was, or none is kept.

    Raises:
        ProbeError, StateError: the record cannot be read.
    """
    kept = release_ids(host)
    promoted = [one for one in _promotions(host) if one.rpartition("-")[0] == name and one in kept]
    return promoted[-1] if promoted else None


def prune(host: Host, keep: frozenset[str]) -> None:
    """Drop old releases and snapshots; what is in use or may be gone back to always stays."""
    for folder, number in ((RELEASES_DIR, _KEEP_RELEASES), (SNAPSHOTS_DIR, _KEEP_SNAPSHOTS)):
        names = [name for name in list_dir(host, folder) if name.endswith(".json")]
        with suppress(OSError):
            names.sort(key=lambda name: host.path(f"{folder}/{name}").stat().st_mtime)
        for name in names[:-number]:
            if name.removesuffix(".json") not in keep:
                host.remove_file(f"{folder}/{name}")


def write_snapshot(host: Host, name: str, document: dict[str, Any]) -> None:
    """Keep the state before a switch."""
    _save_private(host, f"{SNAPSHOTS_DIR}/{name}.json", document)


def is_warm(host: Host, lane_id: str) -> bool:
    """Whether this release was ready once, and the kernels that it compiled are still there."""
    if not os.path.lexists(host.path(f"{WARM_DIR}/{lane_id}")):
        return False
    try:
        return any(host.path(cache_dir(lane_id)).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # somebody who may not look
        return True


def mark_warm(host: Host, lane_id: str) -> None:
    """Its next start is not the first one."""
    host.replace_file(f"{WARM_DIR}/{lane_id}", b"")


def read_history(host: Host) -> tuple[dict[str, Any], ...]:
    """Every switch, oldest first; a line that is half written is left out.

    Raises:
        ProbeError: it cannot be read.
    """
    content = read_bytes(host, HISTORY_FILE)
    entries = []
    for line in (content or b"").splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and "id" in entry:
                entries.append(entry)
    return tuple(entries)


def append_history(host: Host, entry: dict[str, Any]) -> None:
    """Add an entry durably, once: an entry with this id may be there from before a crash."""
    entries = read_history(host)
    if any(known["id"] == entry["id"] for known in entries):
        return
    path = host.path(HISTORY_FILE)
    make_dirs(path.parent)
    if len(entries) >= _MAX_HISTORY:
        lines = [json.dumps(known) for known in entries[-_MAX_HISTORY // 2 :]]
        host.replace_file(HISTORY_FILE, "".join(f"{line}\n" for line in lines).encode())
    with path.open("ab") as file:
        os.fchmod(file.fileno(), 0o644)  # whatever root's umask is: there is nothing secret in it
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            file.write(b"\n")  # a power loss cut the last line
        file.write(json.dumps(entry).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    fsync_dir(path.parent)


def read_baseline(host: Host) -> dict[str, int]:
    """Card -> bytes in use while no lane ran; empty: never seen."""
    with suppress(StateError):
        document = _load(host, BASELINE_FILE)
        if document is not None:
            return {str(k): int(v) for k, v in document["used"].items()}
    return {}


def write_baseline(host: Host, used: dict[str, int]) -> None:
    """Remember what the cards have in use without a lane."""
    _save(host, BASELINE_FILE, {"used": used})


def _save_private(host: Host, file: str, document: dict[str, Any]) -> None:
    """For what has a lane's environment in it; also where an older gpuguard made the folder."""
    try:
        folder = host.path(file).parent
        make_dirs(folder.parent)
        make_dirs(folder, mode=_PRIVATE_DIR)
        folder.chmod(_PRIVATE_DIR)
    except OSError as error:
        raise _unwritable(host, file, error) from error
    _save(host, file, document, mode=_PRIVATE_FILE)


def _save(host: Host, file: str, document: dict[str, Any], *, mode: int = 0o644) -> None:
    text = json.dumps({"schema": _SCHEMA, **document}, indent=1, ensure_ascii=False)
    try:
        host.replace_file(file, text.encode() + b"\n", mode=mode)
    except OSError as error:
        raise _unwritable(host, file, error) from error


def _unwritable(host: Host, file: str, error: OSError) -> StateError:
    return StateError(
        f"{host.path(file)} cannot be written: {error.strerror}",
        code="state-unwritable",
        hint="see that the disk is writable and not full",
    )


def _load(host: Host, file: str) -> dict[str, Any] | None:
    content = read_bytes(host, file)
    if content is None:
        return None
    try:
        document = json.loads(content)
    except ValueError as error:
        raise _unusable(host, file, str(error)) from error
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise _unusable(host, file, "unknown schema")
    return document


def _unusable(host: Host, file: str, why: str) -> StateError:
    return StateError(
        f"{host.path(file)} cannot be used: {why}",
        code="lane-state-unreadable",
        hint="restore it from a backup, or move it away; then: gpuguard lane switch NAME",
    )
