"""Let apt install, and get over whatever happens to us meanwhile.

apt writes into memory that is its own: not into a pipe of ours, which breaks when we are killed,
and not into a file, whose disk may be full. Either would end dpkg half-way. The log is a copy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuguard.errors import CommandError, LockHeldError, StateError
from gpuguard.host import Host
from gpuguard.host.signals import HeldSignals
from gpuguard.probes import apt
from gpuguard.state import LOGS_DIR

_KEEP = 20  # logs
_LOOK_AGAIN = 0.1
_TAIL = 25
_FOR_EVER = float("inf")
_FINISH_SECONDS = 1800.0  # for what is half done already
_CHUNK = 1 << 16
_NO_SPACE = "no space left on device"
_MARK_SECONDS = 120.0
_LOCK_WORDS = ("unable to acquire the dpkg frontend lock", "could not get lock", "unable to lock")
#: Tells gpuguard's own check, which apt calls before dpkg, that this is the window itself.
_OURS = {"GPUGUARD_APT_CHECK": "never"}
#: Output goes to "$0", memory of gpuguard's; the shell outlives us and keeps the whole log ("$1").
#: A disk that is full, or a shell of whom nobody reads, costs the log and nothing else.
_SHELL = """\
exec >/dev/null 2>&1 3>>"$0" 4<"$0"
log=$1; shift
"$@" >&3 2>&3 3>&- 4<&-
status=$?
{ cat <&4 >"$log"; } || :
exit $status
"""
_OPTIONS = (
    "--yes", "--quiet",
    "-o", "Dpkg::Options::=--force-confdef",
    "-o", "Dpkg::Options::=--force-confold",
    "-o", "Dpkg::Use-Pty=0",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AptLog:
    """A log's name inside the host, and as this process opens it."""

    inside: str
    path: Path


def new_log(host: Host, name: str) -> AptLog:
    """An empty log below ``LOGS_DIR``; the oldest ones go.

    Raises:
        StateError: it cannot be made.
    """
    try:
        folder = host.make_dir(LOGS_DIR)
        old = sorted(folder.glob("upgrade-*.log"), key=lambda path: path.stat().st_mtime)
        for path in old[: -_KEEP + 1]:
            path.unlink(missing_ok=True)
        path = folder / f"upgrade-{name}.log"
        path.touch(mode=0o640)
    except OSError as error:
        raise StateError(
            f"no log can be written in {LOGS_DIR}: {error.strerror}",
            code="state-unwritable",
            hint=f"see that {LOGS_DIR} is writable and not full; nothing was changed",
        ) from error
    return AptLog(f"{LOGS_DIR}/{path.name}", path)


def install(
    host: Host,
    words: Sequence[str],
    log: AptLog,
    *,
    lock_timeout: float,
    on_line: Callable[[str], None],
    on_signal: Callable[[], None],
) -> None:
    """Run ``apt-get install`` and wait for its end; signals that come meanwhile are held back.

    Args:
        host: where.
        words: options and packages.
        log: where apt's and dpkg's output goes.
        lock_timeout: how long apt waits for somebody else's apt or dpkg.
        on_line: told each line, from another thread.
        on_signal: told once, from another thread, if somebody wants us to end.

    Raises:
        LockHeldError: somebody else's apt was at work all the time; nothing was changed.
        CommandError: ``apt-failed``, with the end of the log.
    """
    command = apt.words_inside(
        host, "apt-get", *_OPTIONS, "-o", f"DPkg::Lock::Timeout={lock_timeout:.0f}", "install"
    )
    status, said = _logged(host, (*command, *words), log, _FOR_EVER, on_line, on_signal)
    if status == 0:
        return
    tail = said[-_TAIL:]
    if any(_is_lock(line) for line in tail):
        raise LockHeldError(
            f"apt or dpkg is at work, still after {lock_timeout:g} s",
            hint="wait until it is done and try again; nothing was installed",
        )
    is_full = any(_NO_SPACE in line.lower() for line in said)
    raise CommandError(
        f"apt-get exited with {status}" + (": a file system is full" if is_full else ""),
        code="apt-failed",
        hint=("make room: df -h shows where\n" if is_full else "") + f"whole log: {log.inside}",
        detail="\n".join(tail),
    )


def finish(host: Host, words: Sequence[str], log: AptLog, *, lock_timeout: float) -> None:
    """Let dpkg and apt end what is half done: ``dpkg --configure -a``, ``apt-get -f install``.

    Once, and not for ever; that it fails again is seen by who looks at the packages.

    Raises:
        CommandError: apt or dpkg cannot be run, or went on for half an hour.
    """
    lock = ("-o", f"DPkg::Lock::Timeout={lock_timeout:.0f}")
    for command in (
        ("dpkg", "--force-confdef", "--force-confold", "--configure", "-a"),
        ("apt-get", *_OPTIONS, *lock, "--no-remove", "--fix-broken", "install", *words),
    ):
        _logged(host, apt.words_inside(host, *command), log, _FINISH_SECONDS)


def _logged(
    host: Host,
    command: Sequence[str],
    log: AptLog,
    timeout: float,
    on_line: Callable[[str], None] = lambda _: None,
    on_signal: Callable[[], None] = lambda: None,
) -> tuple[int, list[str]]:
    """Exit status, and all lines; they are in the log behind what it has already."""
    memory = os.memfd_create("gpuguard-apt", os.MFD_CLOEXEC)
    try:
        with suppress(OSError):
            os.write(memory, log.path.read_bytes())
        before = os.lseek(memory, 0, os.SEEK_CUR)
        inherited = f"/proc/{os.getpid()}/fd/{memory}"
        shell = ("sh", "-c", _SHELL, inherited, str(log.path))
        with (
            HeldSignals() as held,
            _Follower(memory, before, log.path, on_line, lambda: held.has_come, on_signal),
        ):
            done = host.run(
                *shell, *command,
                timeout=timeout, ok=None, env={**apt.environment(), **_OURS},
            )  # fmt: skip
        return done.exit_status, _text(memory, before).splitlines()
    finally:
        os.close(memory)


def _text(memory: int, offset: int) -> str:
    return os.pread(memory, os.fstat(memory).st_size - offset, offset).decode("utf-8", "replace")


def _is_lock(line: str) -> bool:
    # Not "Waiting for cache lock: Could not get lock …", after which it may go on
    return line.startswith("E: ") and any(word in line.lower() for word in _LOCK_WORDS)


def mark_automatic(host: Host, packages: Sequence[str]) -> None:
    """Count packages as installed automatically again: asking for them by name has ended that.

    Raises:
        CommandError: apt-mark failed.
    """
    if packages:
        host.run(
            *apt.words_inside(host, "apt-mark", "auto"), *packages,
            timeout=_MARK_SECONDS, env=apt.environment(),
        )  # fmt: skip


class _Follower:
    """Reads what is appended to memory, in a thread of its own; copies it, as far as that works."""

    def __init__(
        self,
        memory: int,
        offset: int,
        copy: Path,
        on_line: Callable[[str], None],
        is_wanted_away: Callable[[], bool],
        on_signal: Callable[[], None],
    ) -> None:
        self._memory, self._offset, self._copy, self._on_line = memory, offset, copy, on_line
        self._is_wanted_away, self._on_signal = is_wanted_away, on_signal
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        told, rest = False, b""
        while True:
            is_last = self._done.is_set()
            *lines, rest = (rest + self._read()).split(b"\n")
            for line in lines:
                self._on_line(line.decode("utf-8", "replace"))
            if is_last:
                return
            if not told and self._is_wanted_away():
                told = True
                self._on_signal()
            time.sleep(_LOOK_AGAIN)

    def _read(self) -> bytes:
        start, found = self._offset, b""
        while chunk := os.pread(self._memory, _CHUNK, self._offset):
            self._offset += len(chunk)
            found += chunk
        if found:  # should the power fail
            with suppress(OSError), self._copy.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), found, start)  # the shell writes the same there
        return found
