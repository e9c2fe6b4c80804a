"""The core objects that were compiled before, by what went into them.

``nv-kernel.o`` and ``nv-modeset-kernel.o`` depend on the source outside ``kernel-open``, the
compiler and the architecture, not on the kernel: a second kernel needs no second build. An
entry is used only if its files still have the SHA-256 of the day they were made.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpuguard.build import products
from gpuguard.build.handover import Taken, take_over
from gpuguard.build.records import Compiler
from gpuguard.build.staging import remove_tree
from gpuguard.host import Host
from gpuguard.host.files import fsync_dir, replace_atomically, sha256_file
from gpuguard.state import CORE_CACHE_DIR

_KEEP = 3  # one has 10 to 180 MB: the version in use, the one before, a try
_META = "meta.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreKey:
    """What the core objects depend on; ``source`` is a digest of the patched tree's part."""

    source: str
    compiler: str
    architecture: str

    @property
    def digest(self) -> str:
        """Name of the cache entry."""
        text = "\0".join((self.source, self.compiler, self.architecture))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreMeta:
    """One entry's ``meta.json``. ``inputs`` are the source and patches that led to it."""

    key: CoreKey
    driver_version: str
    inputs: tuple[str, str]
    objects: Mapping[str, Taken] = field(default_factory=dict)
    build_seconds: float = 0.0
    created: str = ""


def key_of(tree: Path, compiler: Compiler, architecture: str) -> CoreKey:
    """The key of an exported and patched tree."""
    found = products.entries(tree, skip=frozenset({"kernel-open"}))
    return CoreKey(
        source=products.digest(tree, found), compiler=compiler.version, architecture=architecture
    )


def entries(host: Host) -> tuple[tuple[Path, CoreMeta], ...]:
    """Every readable entry, least recently used first."""
    folder = host.path(CORE_CACHE_DIR)
    found = []
    with suppress(OSError):
        for path in folder.iterdir():
            meta = _read(path)
            if meta is not None and path.name == meta.key.digest:
                found.append((path.stat().st_mtime, path, meta))
    return tuple((path, meta) for _, path, meta in sorted(found, key=lambda item: item[0]))


def expected(host: Host, inputs: tuple[str, str], compiler: str) -> bool:
    """True if an earlier build of the same source, patches and compiler left an entry."""
    return any(m.inputs == inputs and m.key.compiler == compiler for _, m in entries(host))


def problem(path: Path, meta: CoreMeta) -> str | None:
    """Why an entry cannot be used: a file that is gone or no longer what was stored."""
    for name, taken in meta.objects.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != taken.size:
            return f"{name} is damaged"
        if sha256_file(file) != taken.sha256:
            return f"{name} is damaged"
    return None if meta.objects else "it is empty"


def store(host: Host, meta: CoreMeta, objects: Mapping[str, Path]) -> Path:
    """Take the compiled objects into the cache, all or nothing; returns the entry's folder.

    Raises:
        FileNotFoundError: an object is not a regular file.
    """
    parent = host.make_dir(CORE_CACHE_DIR)
    parent.chmod(0o755)  # the build user's linker reads them there
    fresh = Path(tempfile.mkdtemp(dir=parent, prefix=".new-"))
    try:
        taken = {name: take_over(file, fresh / name) for name, file in objects.items()}
        content = asdict(meta) | {
            "objects": {name: asdict(item) for name, item in taken.items()},
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        replace_atomically(fresh / _META, text.encode(), mode=0o644)
        fresh.chmod(0o755)
        target = parent / meta.key.digest
        if target.exists():
            remove_tree(target)
        fresh.rename(target)
    except BaseException:
        remove_tree(fresh)
        raise
    fsync_dir(parent)
    prune(host)
    return target


def prune(host: Host) -> None:
    """Drop all but the three entries used last, and what a killed run left."""
    for path, _ in entries(host)[:-_KEEP]:
        remove_tree(path)
    for path in _leftovers(host):
        remove_tree(path)


def touch(path: Path) -> None:
    """Mark an entry as used now."""
    with suppress(PermissionError):
        os.utime(path)


def _leftovers(host: Host) -> Iterator[Path]:
    yield from host.path(CORE_CACHE_DIR).glob(".new-*")


def _read(path: Path) -> CoreMeta | None:
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        raw = json.loads((path / _META).read_text("utf-8"))
        source, patches = raw["inputs"]
        return CoreMeta(
            key=CoreKey(**raw["key"]),
            driver_version=str(raw["driver_version"]),
            inputs=(source, patches),
            objects={n: Taken(t["sha256"], int(t["size"])) for n, t in raw["objects"].items()},
            build_seconds=float(raw["build_seconds"]),
            created=str(raw["created"]),
        )
    return None
