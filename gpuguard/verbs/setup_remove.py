"""Take away what a set-up has brought: the use case behind ``setup --remove``."""

from __future__ import annotations

from pathlib import PurePosixPath

from gpuguard.apply.bootdefault import let_go
from gpuguard.core.setup import UNIT_DIR, SetupPlan, plan_removal
from gpuguard.errors import GpuguardError, PreflightError, UsageError
from gpuguard.host import Host
from gpuguard.probes.boot_pin import GRUB_FILE, probe_boot_pin
from gpuguard.probes.dependents import Dependent, probe_dependents
from gpuguard.setup_record import read_setup
from gpuguard.state import SETUP_FILE
from gpuguard.verbs import units
from gpuguard.verbs.reboot_hold import HOLD_FILE
from gpuguard.verbs.setup import Prepared, apply_plan, found_marks
from gpuguard.verbs.units import Effects


def prepare_removal(host: Host, *, force: bool = False) -> Prepared:
    """Decide what a removal does.

    Raises:
        UsageError: nothing was set up.
        StateError: the record of the last set-up cannot be read.
        ProbeError, CommandError: what depends on our units cannot be told.
    """
    record = read_setup(host)
    if record is None:
        raise UsageError(
            "nothing is set up here: there is no record of a set-up",
            code="not-set-up",
            hint=f"the record would be {SETUP_FILE}; see gpuguard(1), REMOVAL BY HAND",
        )
    names = tuple(
        path.removeprefix(f"{UNIT_DIR}/")
        for path in record.marks
        if path.startswith(f"{UNIT_DIR}/") and "/" not in path.removeprefix(f"{UNIT_DIR}/")
    )
    return Prepared(
        plan=plan_removal(record, found_marks(host, (), record), force=force),
        units=names,
        needed_by=probe_dependents(host, names, ask_systemd=units.has_systemd(host)),
    )


def refuse_if_needed(needed_by: tuple[Dependent, ...]) -> None:
    """What serves behind the gate must not find itself unable to start.

    Raises:
        PreflightError: a unit depends on one of ours.
    """
    if not needed_by:
        return
    names = " ".join(dict.fromkeys(one.unit for one in needed_by))
    files = ", ".join(dict.fromkeys(one.path for one in needed_by if one.path))
    raise PreflightError(
        f"units here cannot start without ours: {'; '.join(one.text for one in needed_by)}",
        code="units-needed",
        hint=f"take these lines out first ({files or f'systemctl cat {names}'}), then: systemctl "
        "daemon-reload\n--force removes ours all the same: what runs goes on, and cannot be "
        "started again",
    )


def remove(host: Host, prepared: Prepared) -> tuple[Effects, list[str]]:
    """Stop the units and take all files and links away in one transaction; and what is to tell."""
    effects = units.stop(host, prepared.units)
    host.remove_file(HOLD_FILE)  # or a later set-up would take a reboot for held
    notes = _free_boot_default(host)
    apply_plan(host, prepared.plan)
    _drop_empty_folders(host, prepared.plan)
    units.reload(host, prepared.plan, effects)
    return effects, notes


def pinned_note(host: Host) -> list[str]:
    """What a removal would do about the boot default.

    Raises:
        ProbeError: it cannot be told.
    """
    pin = probe_boot_pin(host)
    return [] if pin is None else [f"boot     the default is {pin.release} no more ({pin.path})"]


def _free_boot_default(host: Host) -> list[str]:
    try:
        pin = let_go(host, "setup --remove")
    except GpuguardError as error:
        command = f"by hand: rm {GRUB_FILE} && update-grub; with systemd-boot: loader.conf"
        return [f"stays    the boot default as gpuguard has set it: {error.message}; {command}"]
    if pin is None:
        return []
    return [f"boot     the default is {pin.release} no more, but the newest kernel ({pin.path})"]


def _drop_empty_folders(host: Host, plan: SetupPlan) -> None:
    """Those that bear our name; a kill before this leaves them, and that is all."""
    for step in plan.changes:
        for folder in PurePosixPath(step.path).parents:
            if "gpuguard" not in folder.parts:
                break
            host.remove_empty_dir(str(folder))
