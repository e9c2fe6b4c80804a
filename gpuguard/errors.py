"""The error tree: one class per *reaction* of a caller, not one per message.

Every error carries a stable ``code`` (for scripts and ``--json``), an exit
status (sysexits(3) for verbs that act) and a ``hint``: what the operator can do.
"""

from __future__ import annotations

import errno
import os


class GpuguardError(Exception):
    """Base of everything that gpuguard reports to a person.

    Args:
        message: what failed and why, one sentence, without a trailing period.
        hint: what to do about it; may span lines.
        code: a more exact stable code than the class's own.
        detail: the evidence, e.g. the last lines of a log; shown indented.
    """

    code = "error"
    exit_status = 1

    def __init__(
        self, message: str, *, hint: str = "", code: str | None = None, detail: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail
        if code is not None:
            self.code = code


class UsageError(GpuguardError):
    """The request itself cannot be carried out as written."""

    code = "usage"
    exit_status = 2


class ProbeError(GpuguardError):
    """A fact could not be determined; never to be read as "fine"."""

    code = "undetermined"
    exit_status = 3


class CommandError(GpuguardError):
    """A program is missing, timed out, or exited with an unexpected status."""

    code = "command-failed"
    exit_status = os.EX_UNAVAILABLE


class CommandNotFoundError(CommandError):
    """The program is not installed."""

    code = "command-not-found"


class CommandTimeoutError(CommandError):
    """The program gave no result in time and was killed with all its children.

    ``abandoned``: it cannot be killed (uninterruptible sleep) and still runs. ``left``: its
    processes that do, of a run with a ``grace``.
    """

    code = "command-timeout"

    def __init__(self, message: str, *, abandoned: bool = False) -> None:
        super().__init__(message)
        self.abandoned = abandoned
        self.left: tuple[int, ...] = ()


class PreflightError(GpuguardError):
    """Something that a build needs is missing; nothing was touched."""

    code = "preflight"
    exit_status = os.EX_UNAVAILABLE


class PatchRejectedError(GpuguardError):
    """A patch does not apply as it stands; nothing was touched."""

    code = "patch-rejected"
    exit_status = os.EX_DATAERR


class BuildError(GpuguardError):
    """The compiler, or a check of what it made, said no; nothing was installed."""

    code = "build-failed"
    exit_status = os.EX_SOFTWARE


class VerifyError(GpuguardError):
    """After installing, the host did not answer as planned; it was put back."""

    code = "verify-failed"
    exit_status = os.EX_SOFTWARE


class RollbackError(GpuguardError):
    """The old state could not be restored; the journal stays for the next start."""

    code = "rollback-failed"
    exit_status = 71


class StateError(GpuguardError):
    """gpuguard's own records cannot be read or written."""

    code = "state-unreadable"
    exit_status = os.EX_IOERR


def unwritable(error: OSError) -> StateError:
    """What the system said about a file of ours, as an error for a person."""
    return StateError(
        f"{error.filename or 'a file'}: {error.strerror}",
        code="disk-full" if error.errno == errno.ENOSPC else "write-failed",
        hint="mend the disk (full? read-only?) and try again",
    )


class LockHeldError(GpuguardError):
    """Another gpuguard, apt, dpkg or dkms is at work; try again later."""

    code = "lock-held"
    exit_status = os.EX_TEMPFAIL


class InternalError(GpuguardError):
    """Something that this program did not foresee."""

    code = "internal-error"
    exit_status = os.EX_SOFTWARE


class PrivilegeError(GpuguardError):
    """The verb needs root."""

    code = "needs-root"
    exit_status = os.EX_NOPERM


class ConfigError(GpuguardError):
    """The configuration, or a file it names, cannot be used."""

    code = "config"
    exit_status = os.EX_CONFIG


class Interrupted(BaseException):
    """SIGTERM or SIGHUP arrived; unwinding undoes what was begun."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum
