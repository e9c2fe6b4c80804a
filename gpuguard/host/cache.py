"""Remember what a file is, as long as it is the same file.

Key: path, size, mtime, inode. A no-change check reads no module file twice. Losing the
cache costs time, never truth; an unreadable or foreign cache is ignored.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuguard.host.files import replace_atomically, writable_by_others

_SCHEMA = 1


class FileCache:
    """``get`` and ``put`` by file; ``save`` writes what this run used, and only that.

    Args:
        file: where it is kept; None keeps it in memory only.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._old = _load(file) if file is not None else {}
        self._used: dict[str, Any] = {}

    def get(self, path: Path) -> dict[str, Any] | None:
        """What was put for this very file, or None if it is new or has changed."""
        key = _key(path)
        value = self._used.get(key) or self._old.get(key)
        if not isinstance(value, dict):
            return None
        self._used[key] = value
        return value

    def put(self, path: Path, value: dict[str, Any]) -> None:
        """Remember a JSON-serialisable value for this file as it is now."""
        self._used[_key(path)] = value

    def save(self) -> None:
        """Write the cache if anything changed; failing to is no error (read-only disk)."""
        if self._file is None or self._used == self._old:
            return
        document = json.dumps({"schema": _SCHEMA, "files": self._used}).encode()
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_atomically(self._file, document, mode=0o644)


def cache_file(system_file: Path) -> Path | None:
    """Where this user keeps the cache: root in the system's place, others in their home.

    None if there is no home. Root never reads a user's cache, and a user's own cache is
    keyed by full path, so that several ``--root`` trees do not mix.
    """
    if os.geteuid() == 0 or os.access(system_file.parent, os.W_OK):
        return system_file
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("HOME")
    if not home or not Path(home).is_absolute():
        return None
    base = Path(home) if os.environ.get("XDG_CACHE_HOME") else Path(home) / ".cache"
    return base / "gpuguard" / "modules.json"


def _key(path: Path) -> str:
    status = path.stat()
    return f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"


def _load(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        if os.geteuid() == 0 and writable_by_others(file, frozenset({0})):
            return {}
        document = json.loads(file.read_bytes())
        if document["schema"] == _SCHEMA and isinstance(document["files"], dict):
            return dict(document["files"])
    return {}
