"""Put the core objects into an exported tree: from the cache, or compiled now."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from gpuguard.build import core_cache, history
from gpuguard.build.core_cache import CoreKey, CoreMeta
from gpuguard.build.make import Make
from gpuguard.build.records import Compiler
from gpuguard.errors import BuildError, PreflightError
from gpuguard.state import CORE_CACHE_DIR

#: (folder that makes it, object, where kbuild looks for it); NVIDIA's own top Makefile does so.
_OBJECTS = (
    ("src/nvidia", "nv-kernel.o", "kernel-open/nvidia/nv-kernel.o_binary"),
    (
        "src/nvidia-modeset",
        "nv-modeset-kernel.o",
        "kernel-open/nvidia-modeset/nv-modeset-kernel.o_binary",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreInputs:
    """What the key cannot tell: which source and patches led to this tree."""

    source: str
    patches: str
    driver_version: str


def provide(make: Make, compiler: Compiler, inputs: CoreInputs) -> bool:
    """Link the core objects into the staging tree; True if they came from the cache.

    Raises:
        BuildError: they do not compile.
        PreflightError: ``compiler-missing``: C++ sources and no C++ compiler.
    """
    tree = make.staging.tree
    key = core_cache.key_of(tree, compiler, platform.machine())
    entry = make.host.path(f"{CORE_CACHE_DIR}/{key.digest}")
    reason = _why_build(make, key, inputs)
    if reason is None:
        make.progress.step("core", "core objects: cached", 0.0)
        core_cache.touch(entry)
    else:
        entry = _compile(make, compiler, inputs, key, reason)
    for folder, name, place in _OBJECTS:
        if (tree / folder).is_dir():
            _link(make, entry / name, tree / place)
    return reason is None


def _why_build(make: Make, key: CoreKey, inputs: CoreInputs) -> str | None:
    """Why the core must be compiled; None: the cache has it, unharmed."""
    known = core_cache.entries(make.host)
    for path, meta in known:
        if meta.key == key:
            damage = core_cache.problem(path, meta)
            return f"the cached copy cannot be used: {damage}" if damage else None
    same = [meta for _, meta in known if meta.driver_version == inputs.driver_version]
    if not same:
        return "first build of this version"
    if all(meta.key.compiler != key.compiler for meta in same):
        return "the compiler changed"
    return "the source or a patch changed"


def _compile(make: Make, compiler: Compiler, inputs: CoreInputs, key: CoreKey, reason: str) -> Path:
    tree = make.staging.tree
    parts = [part for part in _OBJECTS if (tree / part[0] / "Makefile").is_file()]
    earlier = history.earlier(make.host, "core")
    make.progress.step(
        "core", f"core objects: to be built because {reason}", earlier.seconds if earlier else None
    )
    # Without CXX= NVIDIA's makefiles take "g++", whatever its major; "false" fails at once
    arguments = (f"CC={compiler.cc}", f"CXX={compiler.cxx or 'false'}")
    seconds = make.run(
        "core",
        "compiling the core objects",
        *(("-C", str(tree / folder), *arguments) for folder, _, _ in parts),
    )
    output = f"_out/Linux_{platform.machine()}"  # OUTPUTDIR of NVIDIA's utils.mk
    meta = CoreMeta(
        key=key,
        driver_version=inputs.driver_version,
        inputs=(inputs.source, inputs.patches),
        build_seconds=round(seconds, 1),
    )
    objects = {name: tree / folder / output / name for folder, name, _ in parts}
    try:
        return core_cache.store(make.host, meta, objects)
    except FileNotFoundError as error:
        raise BuildError(
            f"make succeeded but left no {error.filename}",
            hint=f"whole log: {make.log_name}",
            code="core-incomplete",
        ) from error


def _link(make: Make, target: Path, place: Path) -> None:
    """A symlink, not a copy: the object weighs up to 180 MB and is read once."""
    if not place.parent.is_dir():
        raise PreflightError(
            f"the source has no {place.parent.name}", code="source-not-a-source",
            hint="take NVIDIA's open-gpu-kernel-modules as it is",
        )  # fmt: skip
    make.host.run(
        "ln", "--symbolic", "--force", "--no-dereference", str(target), str(place),
        timeout=30, user=make.staging.user,
    )  # fmt: skip
