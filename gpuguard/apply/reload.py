"""Take modules out of the running kernel and load others; on failure, load the old ones back.

``rmmod`` and not ``modprobe -r``: on Debian the file is ``nvidia-current.ko`` while ``nvidia``
is loaded, and ``modprobe -r`` would look for the wrong one, or for more than one.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuguard.core.reload import LOAD_ORDER, UNLOAD_ORDER, Load, OldFile, ReloadPlan, Unload
from gpuguard.errors import CommandError, GpuguardError, ProbeError, RollbackError, VerifyError
from gpuguard.host import Host
from gpuguard.probes.holders import probe_loaded, sysfs_name
from gpuguard.probes.modprobe_options import module_arguments

_TIMEOUT = 180.0  # loading initialises every card, one after the other

Report = Callable[[str], None]


def swap(host: Host, plan: ReloadPlan, report: Report) -> None:
    """Carry the plan out, and see in /sys that the right builds are loaded.

    Raises:
        VerifyError: it failed; the modules that were loaded before are loaded again.
        RollbackError: it failed, and not all of them could be; the message says which.
    """
    before = {module.name: module.build_id for module in probe_loaded(host)}
    try:
        for action in plan.actions:
            _execute(host, action, report)
        _check(host, plan)
    except BaseException as error:
        problems = _put_back(host, plan.old, before)
        if not isinstance(error, CommandError | VerifyError | ProbeError):
            raise
        raise _failure(host, error, before, problems) from error


def state_text(host: Host) -> str:
    """``nvidia 1a2b3c4d5e6f, nvidia-uvm …``: what the running kernel has, by build-id."""
    try:
        loaded = probe_loaded(host)
    except ProbeError as error:
        return f"not known ({error.message})"
    return ", ".join(f"{m.name} {(m.build_id or 'without build-id')[:12]}" for m in loaded) or (
        "no module of the driver"
    )


def _execute(host: Host, action: Unload | Load, report: Report) -> None:
    if isinstance(action, Unload):
        report(f"rmmod {sysfs_name(action.module)}")
        host.run("rmmod", sysfs_name(action.module), timeout=_TIMEOUT)
    else:
        report(f"modprobe {action.module}")
        host.run("modprobe", action.module, timeout=_TIMEOUT)


def _check(host: Host, plan: ReloadPlan) -> None:
    loaded = {module.name: module.build_id for module in probe_loaded(host)}
    for action in plan.actions:
        if isinstance(action, Load) and loaded.get(action.module) != action.build_id:
            found = loaded.get(action.module) or "nothing"
            raise VerifyError(
                f"{action.module}: {found} is loaded, {action.build_id} of {action.path} expected"
            )


def _put_back(host: Host, old: tuple[OldFile, ...], before: dict[str, str | None]) -> list[str]:
    """Make it as it was, as far as files allow; what could not be done, in words."""
    files = {file.module: file.path for file in old}
    problems: list[str] = []
    try:
        loaded = {module.name: module.build_id for module in probe_loaded(host)}
        gone = [name for name in LOAD_ORDER if name in before and loaded.get(name) != before[name]]
        lost = [name for name in gone if files.get(name) is None]
        if lost:
            problems.append(f"no file of the old build of {', '.join(lost)} is in /lib/modules")
            # Old and new must not be mixed: beside the old core nothing new is loaded.
            missing = [name for name in gone if name not in loaded] if "nvidia" in gone else []
            return problems + _load(host, missing, {})
        for name in UNLOAD_ORDER:
            if name in loaded and name in gone:
                _try(host, problems, "rmmod", sysfs_name(name))
        return problems + _load(host, gone, files)
    except GpuguardError as error:
        return [*problems, error.message]


def _load(host: Host, names: list[str], files: dict[str, str | None]) -> list[str]:
    problems: list[str] = []
    for name in names:
        path = files.get(name)
        if path is None:
            _try(host, problems, "modprobe", name)
        else:
            _try(host, problems, "insmod", str(host.path(path)), *module_arguments(host, name))
    return problems


def _try(host: Host, problems: list[str], *argv: str) -> None:
    try:
        host.run(*argv, timeout=_TIMEOUT)
    except CommandError as error:
        said = error.detail.strip().splitlines()
        problems.append(f"{error.message}{f' ({said[-1]})' if said else ''}")


def _failure(
    host: Host, error: GpuguardError, before: dict[str, str | None], problems: list[str]
) -> GpuguardError:
    try:
        now = {module.name: module.build_id for module in probe_loaded(host)}
    except ProbeError:
        now = {}
    state = f"loaded now: {state_text(host)}"
    detail = "\n".join(filter(None, (error.detail, *problems, state)))
    if now == before:
        return VerifyError(
            f"the modules could not be swapped, the old ones are loaded again: {error.message}",
            code="reload-failed",
            hint="see dmesg for NVRM lines; a reboot loads the new ones",
            detail=detail,
        )
    return RollbackError(
        f"the modules could not be swapped, and the old ones are not all back: {error.message}",
        code="reload-incomplete",
        hint="see dmesg for NVRM lines; reboot (gpuguard status says whether that is safe)",
        detail=detail,
    )
