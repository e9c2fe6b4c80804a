"""What a build for a kernel would be made from, and what stands in its way; reads only."""

from __future__ import annotations

import os
import platform
import pwd
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpuguard.build import compiler as compilers
from gpuguard.build import core_cache, disk, patch_files, sign
from gpuguard.build import source as sources
from gpuguard.build.compress import needed_program
from gpuguard.build.records import Blocker, BuildInputs, Compiler, PatchFile, SourceState
from gpuguard.build.source import SourceProbe
from gpuguard.build.trust import trust_in
from gpuguard.config import Config
from gpuguard.core.facts import HeadersState, KernelFacts, SecureBootFacts, SecureBootState
from gpuguard.errors import ProbeError
from gpuguard.host import BuildUser, Host
from gpuguard.probes.headers import headers_fingerprint
from gpuguard.state import CACHE_DIR

__all__ = ["Blocker", "BuildInputs", "InputsProbe", "build_user", "probe_inputs"]

_PROGRAMS = {"patch": "patch", "make": "make", "strip": "binutils", "tar": "tar"}
#: What ``uname -m`` says, in the kernel's own words (ARCH of its Makefile).
_ARCHITECTURES = {"aarch64": "arm64", "ppc64le": "powerpc"}
_NO_SECURE_BOOT = SecureBootFacts(state=SecureBootState.UNKNOWN)


def probe_inputs(
    host: Host,
    config: Config,
    kernel: KernelFacts,
    driver_version: str | None,
    secure_boot: SecureBootFacts = _NO_SECURE_BOOT,
) -> BuildInputs:
    """Inputs and blockers for one kernel; for several, an ``InputsProbe`` looks only once."""
    return InputsProbe(host, config, driver_version, secure_boot).for_kernel(kernel)


def build_user(config: Config) -> BuildUser | None:
    """The account that compiles; None: this process is not root and compiles itself.

    Raises:
        KeyError: root, and there is no such account (or it is root again).
    """
    if os.geteuid() != 0:
        return None
    account = pwd.getpwnam(config.build.user)
    if account.pw_uid == 0:
        raise KeyError(config.build.user)
    return BuildUser(account.pw_name, account.pw_uid, account.pw_gid)


@dataclass(slots=True)
class InputsProbe:
    """Looks at source and patches once, and at each compiler once, for any number of kernels."""

    host: Host
    config: Config
    driver_version: str | None
    secure_boot: SecureBootFacts = _NO_SECURE_BOOT
    _source: SourceProbe | None = None
    _patches: tuple[tuple[PatchFile, ...], tuple[Blocker, ...]] | None = None
    _compilers: dict[str | None, Compiler | Blocker] = field(default_factory=dict)

    def for_kernel(self, kernel: KernelFacts) -> BuildInputs:
        """Inputs and blockers for one kernel."""
        source, patches = self._look_at_source(), self._look_at_patches()
        chosen = self._compiler(kernel)
        compiler = chosen if isinstance(chosen, Compiler) else None
        fingerprint, unreadable = self._headers(kernel)
        cached = compiler is not None and core_cache.expected(
            self.host, (source.state.identity, patch_files.fingerprint(patches[0])),
            compiler.version,
        )  # fmt: skip
        blockers = (
            *_version_blockers(self.driver_version),
            *_headers_blockers(kernel),
            *unreadable,
            *([chosen] if isinstance(chosen, Blocker) else []),
            *_cxx_blockers(compiler, source.state, cached=cached),
            *source.blockers,
            *patches[1],
            *_unpatched_blockers(source.state, patches[0], self.config),
            *_program_blockers(self.host, kernel),
            *_user_blockers(self.host, self.config),
            *disk.blockers(self.host, kernel.release, source.state.size_bytes, core_cached=cached),
            *self._signing_blockers(kernel),
        )
        values = {
            "compiler": compiler.version if compiler else "",
            "driver_version": self.driver_version or "",
            "headers": fingerprint,
            "patches": patch_files.fingerprint(patches[0]),
            "source": source.state.identity,
        }
        return BuildInputs(
            inputs=tuple(sorted(values.items())),
            compiler=compiler,
            source=source.state,
            patches=patches[0],
            driver_version=self.driver_version,
            blockers=blockers,
        )

    def _look_at_source(self) -> SourceProbe:
        if self._source is None:
            self._source = sources.probe(self.host, self.config.source, self.driver_version)
        return self._source

    def _look_at_patches(self) -> tuple[tuple[PatchFile, ...], tuple[Blocker, ...]]:
        if self._patches is None:
            try:
                trust = trust_in(self.config.source.trusted_owner)
            except KeyError:  # source.probe says so
                trust = trust_in(None)
            self._patches = patch_files.find(
                self.host, self.config.source.patches, self.driver_version, trust
            )
        return self._patches

    def _compiler(self, kernel: KernelFacts) -> Compiler | Blocker | None:
        if kernel.headers.state is not HeadersState.PRESENT:
            return None  # the headers would say which; they are the thing to get first
        text = kernel.headers.compiler
        if text not in self._compilers:
            self._compilers[text] = compilers.choose(self.host, text)
        return self._compilers[text]

    def _headers(self, kernel: KernelFacts) -> tuple[str, list[Blocker]]:
        if kernel.headers.state is not HeadersState.PRESENT:
            return "", []
        if kernel.headers.fingerprint is not None:
            return kernel.headers.fingerprint, []
        try:
            return headers_fingerprint(self.host, kernel.headers), []
        except ProbeError as error:
            blocker = Blocker(code="headers-incomplete", message=error.message, hint=error.hint)
            return "", [blocker]

    def _signing_blockers(self, kernel: KernelFacts) -> list[Blocker]:
        plan = sign.plan(self.host, self.config.signing, kernel, self.secure_boot)
        return [plan.blocker] if plan.blocker else []


def _version_blockers(driver_version: str | None) -> Iterator[Blocker]:
    if driver_version is None:
        yield Blocker(
            code="driver-version-unknown",
            message="the installed NVIDIA driver's version could not be determined",
            hint="install the driver's userland (libnvidia-ml), or set driver_version",
        )


def _headers_blockers(kernel: KernelFacts) -> Iterator[Blocker]:
    headers = kernel.headers
    package = headers.package or f"linux-headers-{kernel.release}"
    hint = f"apt-get install {package}; until then keep booting a kernel that is ready"
    if headers.state is HeadersState.MISSING:
        why = f" ({'; '.join(headers.missing)})" if headers.missing else ""
        yield Blocker(
            code="headers-missing", message=f"no headers for {kernel.release}{why}", hint=hint
        )
        return
    if headers.release not in (None, kernel.release):
        yield Blocker(
            code="headers-wrong-kernel",
            message=f"{headers.build_dir} is for {headers.release}, not for {kernel.release}",
            hint=hint.replace("install", "install --reinstall", 1),
        )
    elif headers.state is HeadersState.INCOMPLETE:
        yield Blocker(
            code="headers-incomplete",
            message=f"the headers of {kernel.release} lack {', '.join(headers.missing) or 'files'}",
            hint=hint.replace("install", "install --reinstall", 1),
        )
    here = _ARCHITECTURES.get(platform.machine(), platform.machine())
    if headers.architecture not in (None, here):
        yield Blocker(
            code="architecture-mismatch",
            message=f"{kernel.release} is for {headers.architecture}, this machine is {here}",
            hint="modules are compiled on a machine of their own architecture",
        )


def _cxx_blockers(
    compiler: Compiler | None, source: SourceState, *, cached: bool
) -> Iterator[Blocker]:
    if compiler is not None and compiler.cxx is None and source.has_cxx and not cached:
        yield compilers.cxx_blocker(compiler)


def _unpatched_blockers(
    source: SourceState, patches: tuple[PatchFile, ...], config: Config
) -> Iterator[Blocker]:
    if patches or config.source.patches or source.differs_from_stock:
        return
    if source.differs_from_stock is None and not config.source.already_patched:
        # the one mistake that this program is there to prevent must not be made by it
        yield Blocker(
            code="source-not-patched",
            message=f"nothing says that {source.path} is patched: no patches, no stock_ref",
            hint=(
                "list source.patches, or set source.stock_ref to compare with, or give your word: "
                "source.already_patched: true"
            ),
            exit_status=os.EX_CONFIG,
        )
    elif source.differs_from_stock is False:
        yield Blocker(
            code="source-not-patched",
            message=f"{source.ref} has the same tree as the stock ref, and there is no patch",
            hint="set source.ref to the patched branch or tag, or list source.patches",
            exit_status=os.EX_CONFIG,
        )


def _program_blockers(host: Host, kernel: KernelFacts) -> Iterator[Blocker]:
    try:
        compressor = needed_program(kernel.suffix)
    except KeyError:
        yield Blocker(
            code="compression-unknown",
            message=f"modules of {kernel.release} end in {kernel.suffix}, which is not known",
            hint="known: none, .xz, .zst, .gz",
        )
        return
    packages = {"xz": "xz-utils"}
    programs = _PROGRAMS | (
        {compressor: packages.get(compressor, compressor)} if compressor else {}
    )
    for program, package in programs.items():
        if not host.has_program(program):
            yield Blocker(
                code="program-missing",
                message=f"{program} is not installed",
                hint=f"apt-get install {package}",
            )


def _user_blockers(host: Host, config: Config) -> Iterator[Blocker]:
    name = config.build.user
    try:
        user = build_user(config)
    except KeyError:
        yield Blocker(
            code="build-user-missing",
            message=f"there is no unprivileged account {name} to compile as",
            hint=f"useradd --system --no-create-home --shell /usr/sbin/nologin {name}",
        )
        return
    closed = _closed_folder(host.path(CACHE_DIR).parent, user) if user else None
    if closed is not None:
        yield Blocker(
            code="staging-unreachable",
            message=f"{name} compiles in {CACHE_DIR}, but may not enter {closed}",
            hint=f"chmod o+x {closed}",
        )


def _closed_folder(folder: Path, user: BuildUser) -> Path | None:
    """The first folder on the way that an account may not enter."""
    for step in (*reversed(folder.parents), folder):
        if not step.exists():
            return None
        status = step.stat()
        # It compiles in a group of its own: what its usual group may do does not help
        bit = 0o100 if status.st_uid == user.uid else 0o001
        if not status.st_mode & bit:
            return step
    return None
