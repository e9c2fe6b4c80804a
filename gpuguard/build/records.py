"""What the parts of a build hand to each other. Plain records, no I/O.

Paths are absolute paths inside the host, except where a field says ``Path``: those can be
opened by this process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpuguard.errors import ConfigError, GpuguardError, PatchRejectedError, PreflightError

_ERROR_CLASS: dict[int, type[GpuguardError]] = {
    os.EX_CONFIG: ConfigError,
    os.EX_DATAERR: PatchRejectedError,
}

_ONLY_FOR_TRYING = frozenset({"signing_key", "timeout_seconds"})
#: Failures that say nothing about the inputs: the same build may work a minute later.
TRANSIENT_CODES = frozenset(
    {"source-changed", "patch-changed", "disk-full", "staging-unwritable", "build-left-processes"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocker:
    """One reason why a build cannot start; found without changing anything."""

    code: str
    message: str
    hint: str
    exit_status: int = os.EX_UNAVAILABLE

    def error(self) -> GpuguardError:
        """The blocker as an error of the class that has its exit status."""
        kind = _ERROR_CLASS.get(self.exit_status, PreflightError)
        return kind(self.message, hint=self.hint, code=self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """The compiler for one kernel.

    ``version`` is the first line of ``--version`` under the name gcc, the compiler's identity.
    ``cxx`` None: no C++ compiler of the same major is installed. ``remark``: how it differs
    from the kernel's.
    """

    cc: str
    version: str
    major: int
    cxx: str | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchFile:
    """One configured patch, by content."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """What would be compiled.

    ``identity`` is ``git:<tree>`` for a clone at a ref and ``sha256:<digest>`` for a folder as
    it stands; empty when it could not be told. ``git_dir`` is the clone's repository, symlinks and
    ``.git`` files followed. ``differs_from_stock`` None: no stock ref to compare with.
    """

    path: str
    ref: str | None = None
    commit: str | None = None
    identity: str = ""
    version: str | None = None  # NVIDIA_VERSION of version.mk
    size_bytes: int = 0
    has_cxx: bool = False
    differs_from_stock: bool | None = None
    git_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInputs:
    """Everything that decides what a build for one kernel would make.

    ``inputs`` has sorted keys, and a failure is remembered by all of them. A rebuild is due when
    one differs from the build record's, which has only the ``lasting`` ones: more time, or a
    mended key, is a reason to try again, and none to compile anew what was made.
    """

    inputs: tuple[tuple[str, str], ...]
    compiler: Compiler | None
    source: SourceState
    patches: tuple[PatchFile, ...] = ()
    driver_version: str | None = None
    blockers: tuple[Blocker, ...] = ()

    @property
    def lasting(self) -> tuple[tuple[str, str], ...]:
        """The inputs that decide what a finished build contains."""
        return tuple((key, value) for key, value in self.inputs if key not in _ONLY_FOR_TRYING)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModule:
    """One finished module file in the staging folder, ready to be installed as it is."""

    name: str
    base_name: str
    file: Path
    build_id: str
    sha256: str  # of the file as it is, compressed and signed


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """A finished build; ``staging`` and the files in it live until the build's context ends."""

    release: str
    driver_version: str
    modules: tuple[BuiltModule, ...]
    inputs: tuple[tuple[str, str], ...]
    core_cached: bool
    signed: bool
    duration_seconds: float
    log: str
    staging: Path
