"""What stands in the way of a build, each found without changing anything."""

from __future__ import annotations

import os
import platform
import pwd
from collections.abc import Iterator
from pathlib import Path

from gpuguard.build import compiler as compilers
from gpuguard.build.compress import needed_program
from gpuguard.build.records import Blocker, Compiler, PatchFile, SourceState
from gpuguard.build.trust import Trust
from gpuguard.config import Config
from gpuguard.core.facts import HeadersState, KernelFacts
from gpuguard.host import BuildUser, Host
from gpuguard.host.files import way_to
from gpuguard.state import CACHE_DIR

_PROGRAMS = {"patch": "patch", "make": "make", "strip": "binutils", "tar": "tar"}
#: What ``uname -m`` says, in the kernel's own words (ARCH of its Makefile).
_ARCHITECTURES = {"aarch64": "arm64", "ppc64le": "powerpc"}


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


def version(driver_version: str | None) -> Iterator[Blocker]:
    """The driver's version is not known."""
    if driver_version is None:
        yield Blocker(
            code="driver-version-unknown",
            message="the installed NVIDIA driver's version could not be determined",
            hint="install the driver's userland (libnvidia-ml), or set driver_version",
        )


def headers(kernel: KernelFacts) -> Iterator[Blocker]:
    """The kernel's headers are missing, not whole, or another's."""
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


def untrusted_headers(
    host: Host, kernel: KernelFacts, trust: Trust, known: dict[Path, str | None]
) -> Iterator[Blocker]:
    """Headers are source, and have programs that the build runs.

    Args:
        host: where they are.
        kernel: whose headers.
        trust: whom root believes.
        known: what was found out about a folder; kernels share one.
    """
    headers = kernel.headers
    if headers.state is HeadersState.MISSING or not trust.enforced:
        return
    for place in dict.fromkeys(
        (f"/lib/modules/{kernel.release}/build", headers.build_dir, headers.source_dir)
    ):
        if place is None or not host.path(place).exists():
            continue
        folder = way_to(host.root / place.lstrip("/"), host.root)[0]
        if folder not in known:
            known[folder] = trust.problem_within(folder, host.root)
        problem = trust.problem(host, place) or known[folder]
        if problem is not None:
            yield Blocker(
                code="headers-untrusted",
                message=f"headers of {kernel.release} that others than root can write: {problem}",
                hint="reinstall their package, or make them root's own; or name the account that "
                "you trust in source.trusted_owner",
                exit_status=os.EX_CONFIG,
            )
            return


def cxx(compiler: Compiler | None, source: SourceState, *, cached: bool) -> Iterator[Blocker]:
    """The core has C++ sources, is not cached, and nothing compiles them."""
    if compiler is not None and compiler.cxx is None and source.has_cxx and not cached:
        yield compilers.cxx_blocker(compiler)


def unpatched(
    source: SourceState, patches: tuple[PatchFile, ...], config: Config
) -> Iterator[Blocker]:
    """The result would be the stock modules, or nothing says that it would not."""
    if patches or config.source.patches or source.differs_from_stock or not source.identity:
        return  # without an identity it was refused already, and that is the reason to be told
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


def program(host: Host, kernel: KernelFacts) -> Iterator[Blocker]:
    """A program that a build runs is not installed."""
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


def user(host: Host, config: Config) -> Iterator[Blocker]:
    """There is no account to compile as, or it cannot get to where it compiles."""
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
