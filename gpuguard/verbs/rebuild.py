"""Decide, build, commit, record: the use case behind ``rebuild``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from gpuguard.apply.actions import Depmod, RemoveFile
from gpuguard.apply.backups import list_backups, prune, take
from gpuguard.apply.initramfs import check_initramfs_possible
from gpuguard.apply.install import (
    NewModule,
    initramfs_actions,
    install_actions,
    our_folder,
    touched_paths,
)
from gpuguard.apply.lock import wait_for_package_tools
from gpuguard.apply.room import check_room, check_writable
from gpuguard.apply.transaction import apply
from gpuguard.build.inputs import BuildInputs
from gpuguard.build.pipeline import BuildResult
from gpuguard.build.prebuilt import forget_prebuilt, provide_modules
from gpuguard.build.progress import Progress
from gpuguard.build.records import TRANSIENT_CODES
from gpuguard.config import Config
from gpuguard.core.facts import BuildFailure, BuildRecord, HostFacts, KernelFacts
from gpuguard.core.plan import Forget, Leave, Rebuild, RefreshInitramfs, Step, is_gone
from gpuguard.core.readiness import obstacles
from gpuguard.core.stray import stray_backups
from gpuguard.errors import (
    BuildError,
    GpuguardError,
    PatchRejectedError,
    PreflightError,
    VerifyError,
)
from gpuguard.host import Host
from gpuguard.left_alone import left_alone_file
from gpuguard.probes.headers import headers_fingerprint
from gpuguard.probes.modules_config import modules_config_fingerprint
from gpuguard.records import forget_failure, record_files, record_path, write_failure
from gpuguard.state import module_tree
from gpuguard.tally import tallied
from gpuguard.verbs.clock import now
from gpuguard.verbs.inspect import Planned, look


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one step; ``error`` None: it worked (or nothing was to do)."""

    step: Step
    error: GpuguardError | None = None
    backup: str | None = None
    result: BuildResult | None = None


def rebuild(host: Host, config: Config, planned: Planned, progress: Progress) -> Iterator[Outcome]:
    """Carry out a plan, kernel by kernel; one kernel's failure does not stop the others.

    The caller holds the lock and has recovered an interrupted change.

    Raises:
        StateError: the backups cannot be read; nothing was changed.
    """
    os.umask(0o022)  # what depmod and initramfs tools write is for everyone to read
    list_backups(host)  # ``prune`` must know them all
    for step in planned.plan.steps:
        try:
            yield _carry_out(step, host, config, planned, progress)
        except GpuguardError as error:
            yield Outcome(step=step, error=error)
    prune(host, keep=config.backups.keep, gone=_gone(host, planned))


def _gone(host: Host, planned: Planned) -> frozenset[str]:
    if planned.request.releases is not None:
        return frozenset()  # asked for certain kernels: nothing is decided about others
    releases = {backup.release for backup in list_backups(host)}
    return frozenset(release for release in releases if is_gone(release, planned.facts))


def left_unready(host: Host, config: Config, outcomes: list[Outcome]) -> dict[str, tuple[str, ...]]:
    """Kernels that nothing failed for and that are not ready all the same: release -> why.

    Looked at anew: a module may be patched and signed now, and its key not enrolled.
    """
    asked = {o.step.release for o in outcomes if o.error is None and not isinstance(o.step, Forget)}
    facts = look(host, config, with_p2p=False)
    return {
        kernel.release: tuple(obstacle.message for obstacle in found)
        for kernel in facts.kernels
        if kernel.release in asked and (found := obstacles(kernel, facts.driver, facts.secure_boot))
    }


def worst_exit_status(outcomes: list[Outcome], unready: Mapping[str, object]) -> int:
    """Exit status of a whole run: that of the first failure.

    Without one 0, or 1 if a kernel that was asked for is left not ready: ``rebuild && reboot``
    must not go on to the reboot.
    """
    failed = (o.error.exit_status for o in outcomes if o.error is not None)
    return next(failed, 1 if unready else os.EX_OK)


def _carry_out(
    step: Step, host: Host, config: Config, planned: Planned, progress: Progress
) -> Outcome:
    match step:
        case Leave():
            return Outcome(step=step)
        case Forget():
            _forget(step, host)
            return Outcome(step=step)
        case RefreshInitramfs():
            return _refresh(step, host, config, _kernel(planned.facts, step.release))
        case Rebuild():
            kernel = _kernel(planned.facts, step.release)
            with tallied(host):
                return _rebuild(step, host, config, kernel, planned, progress)


def _rebuild(
    step: Rebuild,
    host: Host,
    config: Config,
    kernel: KernelFacts,
    planned: Planned,
    progress: Progress,
) -> Outcome:
    if step.blockers:
        raise _blocked(step)
    check_writable(host, kernel)
    _check_initramfs(host, kernel)  # before minutes of compiling, and again after them
    inputs = planned.inputs[step.release]
    try:
        with provide_modules(
            host,
            config,
            kernel,
            inputs,
            planned.facts.secure_boot,
            _base_names(kernel, planned.facts),
            progress,
        ) as result:
            backup = _install(host, config, kernel, result, progress)
            return Outcome(step=step, backup=backup, result=result)
    except (BuildError, PatchRejectedError, VerifyError) as error:
        if error.code not in TRANSIENT_CODES:  # "try again" is what those say
            _remember(host, kernel, inputs, error)
        raise


def _install(
    host: Host, config: Config, kernel: KernelFacts, result: BuildResult, progress: Progress
) -> str:
    progress.step("install", f"into {our_folder(kernel.release)}", None)
    wait_for_package_tools(host, config.lock_timeout_seconds)
    kernel = _as_it_is_now(host, config, kernel, result)
    stray = stray_backups(kernel)
    _check_initramfs(host, kernel)
    created = _time_of_its_own(host, kernel.release)
    record = BuildRecord(
        release=kernel.release,
        driver_version=result.driver_version,
        build_ids=tuple((module.name, module.build_id) for module in result.modules),
        inputs=result.inputs,
        created=created,
        duration_seconds=round(result.duration_seconds, 1),
        core_cached=result.core_cached,
    )
    modules = tuple(
        NewModule(
            name=module.name,
            file_name=module.file.name,
            source=module.file,
            build_id=module.build_id,
            sha256=module.sha256,
        )
        for module in result.modules
    )
    actions = install_actions(host, kernel, record, modules, stray)
    if kernel.left_alone is not None:
        actions = (RemoveFile(path=left_alone_file(kernel.release)), *actions)
    check_room(actions, host, kernel)
    backup = take(
        host,
        kernel,
        reason="before rebuild",
        created=created,
        paths=touched_paths(kernel, stray),
    )
    apply(
        actions,
        host,
        verb="rebuild",
        release=kernel.release,
        started=created,
        backup=backup.id,
    )
    forget_failure(host, kernel.release)
    forget_prebuilt(host, kernel.release)
    return backup.id


def _as_it_is_now(
    host: Host, config: Config, kernel: KernelFacts, result: BuildResult
) -> KernelFacts:
    """The kernel looked at again: apt and dkms were free to work while we compiled.

    Raises:
        PreflightError: it is not what was built for any more.
    """
    facts = look(host, config, with_p2p=False)
    found = next((k for k in facts.kernels if k.release == kernel.release and k.image), None)
    wanted = config.driver_version or facts.driver.userland
    headers = "" if found is None else headers_fingerprint(host, found.headers)
    if found is None or found.problem is not None:
        what = "the kernel went away"
    elif wanted != result.driver_version:
        what = f"the driver's userland is {wanted} now, {result.driver_version} was built"
    elif headers != dict(result.inputs)["headers"]:
        what = "its headers changed"
    else:
        return found
    raise PreflightError(
        f"{kernel.release}: {what} while the modules were compiled",
        code="changed-meanwhile",
        hint="gpuguard rebuild once more; nothing was changed",
    )


def _time_of_its_own(host: Host, release: str) -> str:
    # A record is named by its second; two builds within one happen with tiny sources only.
    while host.path(record_path(release, created := now())).exists():
        time.sleep(0.05)
    return created


def _refresh(step: RefreshInitramfs, host: Host, config: Config, kernel: KernelFacts) -> Outcome:
    wait_for_package_tools(host, config.lock_timeout_seconds)
    _check_initramfs(host, kernel)
    actions = initramfs_actions(kernel)
    check_room(actions, host, kernel)
    created = now()
    backup = take(
        host, kernel, reason="before initramfs", created=created, paths=touched_paths(kernel, ())
    )
    apply(
        actions,
        host,
        verb="initramfs",
        release=step.release,
        started=created,
        backup=backup.id,
    )
    return Outcome(step=step, backup=backup.id)


def _forget(step: Forget, host: Host) -> None:
    paths = [*record_files(host, step.release)]
    folder = host.path(our_folder(step.release))
    if folder.is_dir():
        paths += [f"{our_folder(step.release)}/{entry.name}" for entry in folder.iterdir()]
    tree_is_there = host.path(f"{module_tree(step.release)}/modules.dep").exists()
    apply(
        (
            *(RemoveFile(path=path) for path in paths),
            *((Depmod(release=step.release),) if tree_is_there else ()),
        ),
        host,
        verb="forget",
        release=step.release,
        started=now(),
        backup=None,
    )
    # Neither dpkg nor DKMS comes back for folders that our files have kept alive.
    for empty in (f"{module_tree(step.release)}/updates", module_tree(step.release)):
        with suppress(OSError):
            host.path(empty).rmdir()


def _blocked(step: Rebuild) -> PreflightError:
    first = step.blockers[0]
    error = PreflightError(
        f"{step.release}: {first.message}",
        code=first.code,
        hint=first.hint,
        detail="\n".join(f"also: {other.message} [{other.code}]" for other in step.blockers[1:]),
    )
    error.exit_status = first.exit_status
    return error


def _remember(host: Host, kernel: KernelFacts, inputs: BuildInputs, error: GpuguardError) -> None:
    also: tuple[tuple[str, str], ...] = ()
    if isinstance(error, VerifyError):
        also = (("modules_config", modules_config_fingerprint(host)),)
    failure = BuildFailure(
        release=kernel.release,
        inputs=(*inputs.inputs, *also),
        code=error.code,
        message=error.message,
        created=now(),
    )
    with suppress(OSError):  # a full disk costs another try, not the reason of this failure
        write_failure(host, failure)


def _base_names(kernel: KernelFacts, facts: HostFacts) -> dict[str, str]:
    """Canonical name -> file base name, as modprobe resolves it here or for another kernel."""
    names = {module.name: module.name for module in kernel.modules}
    for other in (*facts.kernels, kernel):
        names |= {m.name: m.file.base_name for m in other.modules if m.file is not None}
    return names


def _kernel(facts: HostFacts, release: str) -> KernelFacts:
    return next(kernel for kernel in facts.kernels if kernel.release == release)


def _check_initramfs(host: Host, kernel: KernelFacts) -> None:
    if initramfs_actions(kernel) and kernel.initramfs.path is not None:
        check_initramfs_possible(kernel.release, kernel.initramfs.path, host)
