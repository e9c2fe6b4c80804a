"""Carry out one action on a host; the only place that maps actions to programs."""

from __future__ import annotations

from pathlib import PurePosixPath

from gpuguard.apply.actions import (
    PACKAGES_FOLDERS,
    Action,
    CheckInitramfs,
    CheckNextKernel,
    CheckResolved,
    Depmod,
    ExpectedModule,
    PutFile,
    PutLink,
    RebuildInitramfs,
    RemoveFile,
    UpdateBootMenu,
)
from gpuguard.apply.boot_menu import update_boot_menu
from gpuguard.apply.initramfs import rebuild_initramfs
from gpuguard.apply.leftover import run_tool
from gpuguard.apply.undo import LinkBefore, put_link
from gpuguard.core.facts import InitramfsState, ModuleFile
from gpuguard.errors import CommandError, VerifyError
from gpuguard.host import Host
from gpuguard.host.cache import FileCache
from gpuguard.host.files import fsync_file, sha256_file
from gpuguard.probes.bootloader import probe_next_kernel
from gpuguard.probes.initramfs import probe_initramfs
from gpuguard.probes.kernels import probe_releases
from gpuguard.probes.modules import iter_build_ids, probe_modules
from gpuguard.probes.modules_config import depmod_options
from gpuguard.state import module_tree

#: What depmod writes (kmod 30, tools/depmod.c), so that it can be put back byte for byte.
DEPMOD_OUTPUTS = (
    "modules.dep", "modules.dep.bin", "modules.alias", "modules.alias.bin", "modules.symbols",
    "modules.symbols.bin", "modules.softdep", "modules.weakdep", "modules.devname",
    "modules.builtin.bin", "modules.builtin.alias.bin",
)  # fmt: skip
_DEPMOD_TIMEOUT = 300.0  # a cold disk with 4,000 modules takes seconds


def execute(action: Action, host: Host) -> None:
    """Do it.

    Raises:
        GpuguardError: it did not work; undoing is the transaction's business.
    """
    match action:
        case PutFile():
            host.replace_file(action.path, action.source, mode=action.mode)
        case PutLink():
            put_link(LinkBefore(path=action.path, target=action.target), host)
        case RemoveFile():
            host.remove_file(action.path)
            folder = str(PurePosixPath(action.path).parent)
            if folder not in PACKAGES_FOLDERS:
                host.remove_empty_dir(folder)
        case Depmod():
            run_depmod(action.release, host)
        case RebuildInitramfs():
            rebuild_initramfs(action.release, action.path, host)
        case UpdateBootMenu():
            update_boot_menu(action.path, host)
        case CheckResolved() | CheckInitramfs() | CheckNextKernel():
            _check(action, host)


def _check(action: CheckResolved | CheckInitramfs | CheckNextKernel, host: Host) -> None:
    match action:
        case CheckResolved():
            _check_resolved(action, host)
        case CheckInitramfs():
            _check_initramfs(action.release, host)
        case CheckNextKernel():
            _check_next(action, host)


def run_depmod(release: str, host: Host) -> None:
    """Run depmod for one release on this root.

    A depmod that outlives us would write over what recovery restored: see ``leftover``.

    Raises:
        VerifyError: it failed.
    """
    options = depmod_options(host)
    try:
        run_tool(host, "depmod", *options, release, timeout=_DEPMOD_TIMEOUT)
    except CommandError as error:
        raise VerifyError(
            f"depmod failed for {release}: {error.message}",
            code="depmod-failed",
            hint=f"see what it says by hand: depmod {release}",
            detail=error.detail,
        ) from error
    for name in DEPMOD_OUTPUTS:  # depmod itself does not fsync
        fsync_file(host.path(f"{module_tree(release)}/{name}"))


def _check_resolved(action: CheckResolved, host: Host) -> None:
    modules = probe_modules(host, action.release, {}, FileCache(None))
    by_name = {module.name: module for module in modules}
    for expected in action.modules:
        module = by_name[expected.name]
        if not _is_as_expected(expected, module.file, host):
            where = module.file.path if module.file else "nothing"
            raise VerifyError(
                f"modprobe would load {where} as {module.name}, not what was installed",
                code="not-resolved",
                hint=(
                    "another depmod configuration or copy wins; see `gpuguard status`"
                    if module.file
                    else f"does a file in modprobe.d keep {module.name} from being loaded? "
                    "then leave it out of build.modules"
                ),
                detail=f"expected build-id {expected.build_id}, SHA-256 {expected.sha256}",
            )


def _is_as_expected(expected: ExpectedModule, file: ModuleFile | None, host: Host) -> bool:
    if file is None or file.build_id != expected.build_id:
        return False
    return sha256_file(host.path(file.path)) == expected.sha256


def _check_next(action: CheckNextKernel, host: Host) -> None:
    installed = [release for release, image in probe_releases(host) if image is not None]
    found = probe_next_kernel(host, installed)
    if found.release not in action.releases:
        raise VerifyError(
            f"{found.source} would start {found.release or 'nobody knows what'} after that, "
            f"not {' or '.join(action.releases)}",
            code="boot-default-failed",
            hint="something else decides: GRUB_DEFAULT in another file, grub-reboot, "
            "a default set by bootctl; it is as it was before",
            detail=found.reason,
        )


def _check_initramfs(release: str, host: Host) -> None:
    modules = probe_modules(host, release, {}, FileCache(None))
    found = probe_initramfs(host, release, dict(iter_build_ids(modules)))
    if found.state in (InitramfsState.STALE, InitramfsState.UNKNOWN):
        raise VerifyError(
            f"the rebuilt {found.path} does not carry the installed modules ({found.state})",
            code="initramfs-not-current",
            hint="see the initramfs tool's configuration (MODULES=, hooks)",
            detail=found.reason,
        )
