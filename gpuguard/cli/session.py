"""What every verb that changes a host does first: rights, lock, clean-up of a crash."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from gpuguard.apply.journal import Journal
from gpuguard.apply.lock import exclusive, is_held, wait_for_package_tools
from gpuguard.apply.recovery import Recovery, recover
from gpuguard.cli.context import Context
from gpuguard.core.upgrade import MENDING
from gpuguard.errors import GpuguardError, PrivilegeError
from gpuguard.state import STATE_DIR
from gpuguard.verbs.inspect import configured
from gpuguard.verbs.window import RecoveredWindow, recover_window
from gpuguard.window import read_window


def require_root(context: Context) -> None:
    """Refuse early, with the line to type.

    Raises:
        PrivilegeError: the running system can only be changed by root.
    """
    if context.host.is_live and os.geteuid() != 0:
        line = shlex.join(["sudo", "gpuguard", *sys.argv[1:]])
        raise PrivilegeError("changing the running system needs root", hint=line)


@contextmanager
def changing(context: Context, lock_timeout: float) -> Iterator[None]:
    """Hold the lock, let apt and dkms end, and finish what an earlier run left behind.

    Raises:
        PrivilegeError, LockHeldError, StateError, RollbackError: see there.
    """
    require_root(context)
    with exclusive(context.host, lock_timeout):
        context.output.has_acted = True  # from here on a full disk for our words is no failure
        # before touching: the files may be theirs; before looking: half of them may be there
        wait_for_package_tools(context.host, lock_timeout)
        recovered = recover(context.host)
        if recovered is not None:
            typer.echo(recovery_line(recovered), err=True)
        _recover_window(context)
        yield


def _recover_window(context: Context) -> None:
    """Hold again what an interrupted maintenance window lifted; a failure is told, no more."""
    try:
        window = read_window(context.host)
        if window is None or not window.phase.is_open:
            return
        config, _ = configured(context.host, context.config_file)
        recovered = recover_window(context.host, config)
        if recovered is not None:
            typer.echo(window_line(recovered), err=True)
    except GpuguardError as error:
        what = "an interrupted maintenance window could not be closed"
        typer.echo(f"gpuguard: {what}: {error.message} [{error.code}]", err=True)
        for line in error.hint.splitlines():
            typer.echo(f"  -> {line}", err=True)


def window_line(recovered: RecoveredWindow) -> str:
    """What the start found of a maintenance window: one sentence, and what it could not mend."""
    what = f"the maintenance window of {recovered.window.started} was interrupted"
    if not recovered.phase.holds_are_off:
        return f"gpuguard: {what} before it changed anything"
    number = len(recovered.holds.held)
    line = f"gpuguard: {what} ({recovered.phase}); {number} packages are on hold again"
    if not recovered.window.unfinished:
        return line
    steps = "\n".join(f"  -> {step}" for step in MENDING.splitlines())
    return f"{line}; packages are half installed:\n{recovered.window.unfinished}\n{steps}"


def recovery_line(recovered: Recovery) -> str:
    """What the start found: one sentence."""
    what = f"the {recovered.verb} of {recovered.release} started {recovered.started}"
    if recovered.outcome == "new state":
        return f"gpuguard: {what} had been completed before it was killed; cleaned up after it"
    if recovered.notes:
        return f"gpuguard: {what} was interrupted and is undone; {'; '.join(recovered.notes)}"
    return f"gpuguard: {what} was interrupted; everything is as it was before it"


def pending_note(context: Context) -> str | None:
    """For verbs that only look: say that an interrupted change waits for its clean-up."""
    if is_held(context.host):
        return "another gpuguard is at work; this is what it has made so far"
    state = Journal(context.host).read()
    if state is None:
        return None
    return (
        f"an interrupted {state.verb} of {state.release} is recorded in {STATE_DIR}; "
        "the next gpuguard rebuild or rollback finishes or undoes it first"
    )
