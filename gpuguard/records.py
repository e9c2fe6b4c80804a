"""What we built, and what failed to build, per kernel release.

Files are JSON with a schema number; readers ignore what they do not know, writers are
atomic. A record that cannot be read is an error, never "not ours".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuguard.core.facts import BuildFailure, BuildRecord
from gpuguard.errors import StateError
from gpuguard.host import Host
from gpuguard.left_alone import left_alone_file
from gpuguard.state import BUILDS_DIR, FAILURES_DIR, depmod_file

_SCHEMA = 1
DEPMOD_HEAD = b"# Written by gpuguard"  # how our depmod configuration begins


def record_path(release: str, created: str) -> str:
    """Where one record lives: ``builds/<release>/<created>.json``."""
    return f"{BUILDS_DIR}/{release}/{created.replace(':', '')}.json"


def encode_record(record: BuildRecord) -> bytes:
    """A record as it is written."""
    document = asdict(record)
    document["build_ids"] = dict(record.build_ids)
    document["inputs"] = dict(record.inputs)
    return json.dumps({"schema": _SCHEMA, **document}, indent=1).encode() + b"\n"


def read_records(host: Host, release: str) -> tuple[BuildRecord, ...]:
    """Our builds for one release, oldest first.

    Raises:
        StateError: a record cannot be read; identities would be guesses.
    """
    folder = host.path(f"{BUILDS_DIR}/{release}")
    records = [_decode_record(path) for path in _json_files(folder)]
    return tuple(sorted(records, key=lambda record: record.created))


def read_failure(host: Host, release: str) -> BuildFailure | None:
    """The remembered failure of one release, if any."""
    path = host.path(_failure_path(release))
    if not path.exists():
        return None
    document = _load(path)
    try:
        return BuildFailure(
            release=document["release"],
            inputs=_pairs(document["inputs"]),
            code=document["code"],
            message=document["message"],
            created=document.get("created", ""),
        )
    except (KeyError, AttributeError) as error:
        raise _unreadable(path, f"lacks {error}") from error


def write_failure(host: Host, failure: BuildFailure) -> None:
    """Remember that a build failed, so that it is not tried again with the same inputs."""
    document = {"schema": _SCHEMA, **asdict(failure), "inputs": dict(failure.inputs)}
    host.replace_file(_failure_path(failure.release), json.dumps(document, indent=1).encode())


def forget_failure(host: Host, release: str) -> None:
    """A build succeeded, or its kernel went away."""
    host.remove_file(_failure_path(release))


def recorded_releases(host: Host) -> tuple[str, ...]:
    """Releases that we hold records, failures or depmod configuration for, sorted."""
    found = set()
    builds = host.path(BUILDS_DIR)
    if builds.is_dir():
        found |= {entry.name for entry in builds.iterdir()}
    found |= {path.stem for path in _json_files(host.path(FAILURES_DIR))}
    prefix, suffix = Path(depmod_file("\0")).name.split("\0")
    folder = host.path(str(Path(depmod_file("")).parent))
    if folder.is_dir():
        for entry in folder.iterdir():
            is_named = entry.name.startswith(prefix) and entry.name.endswith(suffix)
            if is_named and _is_ours(entry):
                found.add(entry.name.removeprefix(prefix).removesuffix(suffix))
    return tuple(sorted(found))


def _is_ours(config: Path) -> bool:
    """An operator may have a ``zz-gpuguard-local.conf``; ours says whose it is."""
    with suppress(OSError), config.open("rb") as file:
        return file.read(len(DEPMOD_HEAD)) == DEPMOD_HEAD
    return False


def record_files(host: Host, release: str) -> tuple[str, ...]:
    """Everything of ours outside the module tree that names one release."""
    folder = f"{BUILDS_DIR}/{release}"
    builds = [f"{folder}/{path.name}" for path in _json_files(host.path(folder))]
    singles = [_failure_path(release), left_alone_file(release), depmod_file(release)]
    return (*builds, *(path for path in singles if host.path(path, follow=False).exists()))


def _failure_path(release: str) -> str:
    return f"{FAILURES_DIR}/{release}.json"


def _json_files(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(folder, str(error.strerror)) from error


def _decode_record(path: Path) -> BuildRecord:
    document = _load(path)
    try:
        return BuildRecord(
            release=document["release"],
            driver_version=document["driver_version"],
            build_ids=_pairs(document["build_ids"]),
            inputs=_pairs(document.get("inputs", {})),
            created=document.get("created", ""),
            duration_seconds=float(document.get("duration_seconds", 0.0)),
            core_cached=bool(document.get("core_cached", False)),
        )
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise _unreadable(path, f"lacks {error}") from error


def _pairs(mapping: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((str(key), str(value)) for key, value in mapping.items()))


def _load(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from error
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise _unreadable(path, "unknown schema")
    return document


def _unreadable(path: Path, why: str) -> StateError:
    return StateError(
        f"{path} cannot be used: {why}",
        hint="restore it from a backup, or move it away and run: gpuguard rebuild --force",
    )
