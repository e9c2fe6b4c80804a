"""The manifest of a model: which files belong to it, with sizes and SHA-256.

A lane pins the manifest's own SHA-256. Hashing 80 GB takes minutes, so what was hashed is
remembered by path, size, mtime and inode; files that are as they were are not read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpuguard.errors import ConfigError
from gpuguard.host import Host
from gpuguard.host.cache import FileCache
from gpuguard.host.files import sha256_file
from gpuguard.host.reading import read_bytes
from gpuguard.serving.lane import Lane
from gpuguard.state import CACHE_DIR

NAME = "manifest.json"
_CACHE_FILE = f"{CACHE_DIR}/models.json"
_SCHEMA = 1
_MAX_BYTES = 64 << 20
_SHOWN = 3

Progress = Callable[[str], None]


def model_problem(host: Host, lane: Lane, progress: Progress = lambda _: None) -> str | None:
    """Why a lane's model is not the one that it pins; None: it is, or nothing is pinned."""
    folder = host.path(lane.model.path)
    if not folder.is_dir():
        return f"there is no model in {lane.model.path}"
    if lane.model.manifest_sha256 is None:
        return None
    content = read_bytes(host, f"{lane.model.path}/{NAME}", max_bytes=_MAX_BYTES)
    if content is None:
        return f"{lane.model.path} has no {NAME}"
    if (problem := _other_manifest(lane, hashlib.sha256(content).hexdigest())) is not None:
        return problem
    files = _files_of(content)
    if files is None:
        return f"{lane.model.path}/{NAME} is no manifest"
    return _files_problem(host, lane, folder, files, progress)


def _other_manifest(lane: Lane, found: str) -> str | None:
    pinned = lane.model.manifest_sha256 or ""
    if found == pinned:
        return None
    return (
        f"{lane.model.path}/{NAME} is another one than the lane pins: sha256 {found[:16]}…, "
        f"not {pinned[:16]}…"
    )


def _files_problem(
    host: Host, lane: Lane, folder: Path, files: dict[str, dict[str, Any]], progress: Progress
) -> str | None:
    wrong = list(_wrong_files(host, folder, files, progress))
    if not wrong:
        return None
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return f"{lane.model.path}: {'; '.join(wrong[:_SHOWN])}{more}"


def _files_of(content: bytes) -> dict[str, dict[str, Any]] | None:
    try:
        files = json.loads(content)["files"]
        for name, entry in files.items():
            int(entry["bytes"])
            str(entry["sha256"])
            if name.startswith("/") or ".." in Path(name).parts:
                return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(files) if files else None


def _wrong_files(
    host: Host, folder: Path, files: dict[str, dict[str, Any]], progress: Progress
) -> Iterator[str]:
    cache = FileCache(host.path(_CACHE_FILE) if os.geteuid() == 0 else None)
    for name, entry in sorted(files.items()):
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                yield f"{name} has {size} bytes, not {entry['bytes']}"
                continue
            known = cache.get(path)
            if known is None:
                progress(f"hashing {name} ({size >> 20} MiB)")
                known = {"sha256": sha256_file(path)}
                cache.put(path, known)
            if known["sha256"] != entry["sha256"]:
                yield f"{name} has another content"
        except OSError as error:
            yield f"{name}: {error.strerror}"
    cache.save()
    for name in _names_in(folder):
        if name not in files:
            yield f"{name} is not in the manifest"


def _names_in(folder: Path) -> Iterator[str]:
    """What belongs to a model: every file but the manifest, and none that is hidden."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name == NAME or any(part.startswith(".") for part in Path(name).parts):
            continue
        if path.is_file() or path.is_symlink():
            yield name


def _require_writable(top: Path, folder: str) -> None:
    """Before hashing, which takes minutes."""
    if not top.is_dir():
        what = "is not a folder" if os.path.lexists(top) else "there is no such folder"
        hint = "name the folder that has the model's files"
        raise ConfigError(f"{folder}: {what}", code="model-missing", hint=hint)
    try:
        with tempfile.TemporaryFile(dir=top):
            pass
    except OSError as error:
        is_denied = isinstance(error, PermissionError)
        raise ConfigError(
            f"{folder}: {NAME} cannot be written: {error.strerror}",
            code="model-unreadable",
            hint="run as root, or as the owner of the folder"
            if is_denied
            else f"make it writable, with room: findmnt -T {folder}; df -h {folder}",
        ) from error


def write_manifest(host: Host, folder: str, progress: Progress = lambda _: None) -> tuple[str, int]:
    """Hash every file of a model and write its manifest; its SHA-256, and how many files.

    Raises:
        ConfigError: there is no such folder, it is empty, or cannot be read or written.
    """
    top = host.path(folder)
    try:
        _require_writable(top, folder)
        files = {}
        for name in _names_in(top):
            path = top / name
            progress(f"hashing {name} ({path.stat().st_size >> 20} MiB)")
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        if not files:
            raise ConfigError(
                f"{folder}: there is no model, only hidden files or none",
                code="model-missing",
                hint="name the folder that has the model's files",
            )
        text = json.dumps({"schema": _SCHEMA, "files": files}, indent=1, sort_keys=True) + "\n"
        host.replace_file(f"{folder}/{NAME}", text.encode())
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror or error}",
            code="model-unreadable",
            hint="run as root" if isinstance(error, PermissionError) else "",
        ) from error
    return hashlib.sha256(text.encode()).hexdigest(), len(files)
