"""Modules that were built before their kernel, or their driver, was installed.

A maintenance window tries the build first and keeps what it made; the rebuild that follows takes
it if a build would be made from exactly the same. What is kept is neither signed nor compressed:
how the modules of a kernel are compressed shows only once it is installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuguard.build import sign
from gpuguard.build.check import check_module
from gpuguard.build.disk import clear_errors
from gpuguard.build.handover import take_over
from gpuguard.build.inputs import build_user
from gpuguard.build.pipeline import build_modules, finish_module
from gpuguard.build.progress import Progress
from gpuguard.build.records import BuildInputs, BuildResult, BuiltModule
from gpuguard.build.staging import staging
from gpuguard.build.trust import trust_in
from gpuguard.config import Config
from gpuguard.core.facts import KernelFacts, SecureBootFacts
from gpuguard.errors import BuildError, GpuguardError
from gpuguard.host import Host
from gpuguard.state import PREBUILT_DIR

_SCHEMA = 1
_MANIFEST = "manifest.json"
#: Not an input of what is kept: it is signed when it is installed.
_LATER = frozenset({"signing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prebuilt:
    """What is kept for one kernel; ``modules`` maps canonical name to (build-id, SHA-256)."""

    release: str
    driver_version: str
    inputs: Mapping[str, str]
    modules: Mapping[str, tuple[str, str]]
    core_cached: bool
    duration_seconds: float
    log: str


@contextmanager
def provide_modules(
    host: Host,
    config: Config,
    kernel: KernelFacts,
    inputs: BuildInputs,
    secure_boot: SecureBootFacts,
    base_names: Mapping[str, str],
    progress: Progress,
) -> Iterator[BuildResult]:
    """The modules of one kernel: those that were built before, if they fit, else built now.

    Arguments and errors as ``build_modules``.
    """
    with ExitStack() as stack:
        result = None
        if (stored := fitting(host, kernel.release, inputs)) is not None:
            ready = _finished(
                host, config, kernel, stored, inputs, secure_boot, base_names, progress
            )
            try:
                result = stack.enter_context(ready)
            except _Unusable as error:
                progress.step("prebuilt", f"not used: {error}", None)
        yield result or stack.enter_context(
            build_modules(host, config, kernel, inputs, secure_boot, base_names, progress)
        )


def build_ahead(
    host: Host,
    config: Config,
    kernel: KernelFacts,
    inputs: BuildInputs,
    secure_boot: SecureBootFacts,
    progress: Progress,
) -> float | None:
    """Build the modules of a kernel and keep them; seconds, or None if they were kept already.

    Raises:
        GpuguardError: as ``build_modules``; what was kept before for this kernel is gone then.
    """
    if fitting(host, kernel.release, inputs) is not None:
        return None
    forget_prebuilt(host, kernel.release)
    with build_modules(
        host, config, kernel, inputs, secure_boot, {}, progress, is_finished=False
    ) as result:
        with clear_errors():
            _keep(host, result)
        return result.duration_seconds


def fitting(host: Host, release: str, inputs: BuildInputs) -> Prebuilt | None:
    """What is kept for a kernel, if a build made now would be made from exactly the same."""
    stored = _read(host, release)
    if stored is None or dict(stored.inputs) != _deciding(inputs.lasting):
        return None
    return stored


def forget_prebuilt(host: Host, release: str) -> None:
    """It is installed now, or out of date."""
    folder = host.path(f"{PREBUILT_DIR}/{release}")
    with suppress(OSError):
        (folder / _MANIFEST).unlink()  # first of all: without it the rest is nothing
    shutil.rmtree(folder, ignore_errors=True)


def keep_only(host: Host, releases: Iterable[str]) -> None:
    """Drop what is kept for other kernels: an upgrade that was planned and never made."""
    folder, wanted = host.path(PREBUILT_DIR), set(releases)
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        if entry.name not in wanted:
            forget_prebuilt(host, entry.name)


class _Unusable(Exception):  # noqa: N818 - not an error for anybody: it is built anew
    """A file is not what the manifest says."""


@contextmanager
def _finished(
    host: Host,
    config: Config,
    kernel: KernelFacts,
    stored: Prebuilt,
    inputs: BuildInputs,
    secure_boot: SecureBootFacts,
    base_names: Mapping[str, str],
    progress: Progress,
) -> Iterator[BuildResult]:
    signing = sign.plan(host, config.signing, kernel, secure_boot)
    if signing.blocker is not None:
        raise signing.blocker.error()
    progress.step("prebuilt", f"{len(stored.modules)} modules, built before", None)
    with staging(host, kernel.release, build_user(config)) as place:
        made = []
        with clear_errors():
            for name, (build_id, digest) in stored.modules.items():
                file = place.out / f"{base_names.get(name, name)}.ko"
                source = host.path(f"{PREBUILT_DIR}/{kernel.release}/{name}.ko")
                _take(source, file, digest, name, kernel.release, stored.driver_version)
                done, sha256 = finish_module(
                    host, file, name, kernel, stored.driver_version, signing, build_id
                )
                made.append(
                    BuiltModule(
                        name=name, base_name=base_names.get(name, name), file=done,
                        build_id=build_id, sha256=sha256,
                    )
                )  # fmt: skip
        yield BuildResult(
            release=kernel.release,
            driver_version=stored.driver_version,
            modules=tuple(made),
            inputs=inputs.lasting,
            core_cached=stored.core_cached,
            signed=signing.signer is not None,
            duration_seconds=stored.duration_seconds,
            log=stored.log,
            staging=place.root,
        )


def _take(source: Path, file: Path, digest: str, name: str, release: str, version: str) -> None:
    try:
        if take_over(source, file).sha256 != digest:
            raise _Unusable(f"{name}.ko is not what was kept")
        check_module(file, name, release, version)
    except (FileNotFoundError, BuildError) as error:
        raise _Unusable(str(error)) from error


def _keep(host: Host, result: BuildResult) -> None:
    folder = f"{PREBUILT_DIR}/{result.release}"
    for module in result.modules:
        host.replace_file(f"{folder}/{module.name}.ko", module.file)
    document = {
        "schema": _SCHEMA,
        "release": result.release,
        "driver_version": result.driver_version,
        "inputs": _deciding(result.inputs),
        "modules": {m.name: {"build_id": m.build_id, "sha256": m.sha256} for m in result.modules},
        "core_cached": result.core_cached,
        "duration_seconds": round(result.duration_seconds, 1),
        "log": result.log,
    }
    # The manifest last: with it, all is there
    content = json.dumps(document, indent=1).encode() + b"\n"
    host.replace_file(f"{folder}/{_MANIFEST}", content)


def _deciding(inputs: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {key: value for key, value in inputs if key not in _LATER}


def _read(host: Host, release: str) -> Prebuilt | None:
    """What the manifest says; None if there is none that root can believe."""
    path = f"{PREBUILT_DIR}/{release}/{_MANIFEST}"
    try:
        document: dict[str, Any] = json.loads(host.path(path).read_bytes())
        if document["schema"] != _SCHEMA or document["release"] != release:
            return None
        stored = Prebuilt(
            release=release,
            driver_version=str(document["driver_version"]),
            inputs={str(key): str(value) for key, value in document["inputs"].items()},
            modules={
                str(name): (str(module["build_id"]), str(module["sha256"]))
                for name, module in document["modules"].items()
            },
            core_cached=bool(document["core_cached"]),
            duration_seconds=float(document["duration_seconds"]),
            log=str(document["log"]),
        )
        trust = trust_in(None)
        files = (path, *(f"{PREBUILT_DIR}/{release}/{name}.ko" for name in stored.modules))
        if any("/" in name for name in stored.modules):
            return None
        return None if any(trust.problem(host, file) for file in files) else stored
    except (OSError, ValueError, KeyError, TypeError, AttributeError, GpuguardError):
        return None  # it only saves time: without it the modules are built
