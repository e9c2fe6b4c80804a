"""What the rest of gpuguard may ask of a machine.

A ``Host`` is a machine, or a directory tree that stands for one (``--root``): a mounted
disk, an image, a test. Paths given to it are absolute paths *inside* the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BuildUser:
    """An unprivileged account that compiles; never root."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Completed:
    """A program that ended: argv, exit status (negative: signal), what it printed."""

    argv: tuple[str, ...]
    exit_status: int
    stdout: str
    stderr: str


class Deadline:
    """A moment that can be moved: a program that reports its steps gets time for each."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def seconds(self) -> float:
        """What was given last."""
        return self._seconds

    def give(self, seconds: float) -> None:
        """So much time from now on, whatever was left."""
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until it is over, 0 or less afterwards."""
        return self._end - time.monotonic()


class Host(Protocol):
    """A machine, or a directory tree that stands for one."""

    root: Path

    @property
    def is_live(self) -> bool:
        """True if the root is ``/``: the machine that this process runs on."""

    def path(self, absolute: str, *, follow: bool = True) -> Path:
        """Map a path inside the host to one that this process can open.

        Absolute symlinks stay inside the root. With ``follow=False`` the last
        component is not followed, so that a link itself can be looked at or removed.
        """

    def inside(self, path: Path) -> str:
        """The reverse of ``path``: what the host itself calls this file."""

    def run(
        self,
        *argv: str,
        timeout: float | Deadline,
        env: Mapping[str, str] = {},
        ok: Sequence[int] | None = (0,),
        cwd: Path | None = None,
        user: BuildUser | None = None,
        stdin: Path | None = None,
        stdout: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        grace: float | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Completed:
        """Run argv without a shell, in a small fixed environment, stdin ``/dev/null``.

        Paths in argv are this process's paths (see ``path``); the program is given the
        root by its own flag (``depmod -b``), never by a chroot.

        Args:
            *argv: program and arguments.
            timeout: seconds; there is no default, a daemon must not hang. On expiry the
                whole process group is killed, and it is not waited for beyond 5 s. A
                ``Deadline`` may be moved meanwhile, from ``on_line``.
            env: added to the small environment (PATH, HOME, ``LC_ALL=C.UTF-8``).
            ok: exit statuses that mean success; None accepts every one.
            cwd: working directory.
            user: account to run as (no capabilities, no new privileges); needs root.
            stdin: file to read from.
            stdout: file that receives standard output as bytes; ``Completed.stdout`` is empty.
            on_line: called for each line of stdout and stderr merged; nothing is kept in memory.
            grace: for programs that may hang: after ``timeout``, seconds to wait for those that
                were killed. Nothing of such a run is left behind, whatever it forked; who cannot
                be killed is named in the error's ``left``. Not together with stdin or stdout.
            pass_fds: descriptors that the program inherits.

        Raises:
            CommandNotFoundError: no such program.
            CommandTimeoutError: no result in time.
            CommandError: an exit status that is not in ok.
        """

    def has_program(self, name: str) -> bool:
        """True if ``run(name, …)`` would find a program of that name."""

    def replace_file(self, absolute: str, source: Path | bytes, *, mode: int = 0o644) -> None:
        """Put content at a path, atomically and durably (temporary file, fsync, rename, fsync).

        Missing parent directories are made. An existing file is replaced in one step.
        """

    def remove_file(self, absolute: str) -> None:
        """Remove a file or symlink durably; absent is fine."""

    def remove_empty_dir(self, absolute: str) -> None:
        """Remove a directory if it is empty; absent or not empty is fine."""

    def make_dir(self, absolute: str, *, mode: int = 0o755) -> Path:
        """Make a directory and its parents; the answer can be opened by this process."""
