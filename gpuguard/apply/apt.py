"""Let apt install, and get over whatever happens to us meanwhile.

apt writes into a log, not into a pipe of ours: killed with us in the middle of dpkg it would leave
packages half installed. Nothing here ends apt or dpkg, however long they take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuguard.errors import CommandError, LockHeldError
from gpuguard.host import Host
from gpuguard.host.signals import HeldSignals
from gpuguard.probes import apt
from gpuguard.state import LOGS_DIR

_KEEP = 20  # logs
_LOOK_AGAIN = 0.1
_TAIL = 25
_FOR_EVER = float("inf")
_MARK_SECONDS = 120.0
_LOCK_WORDS = ("unable to acquire the dpkg frontend lock", "could not get lock", "unable to lock")
#: Tells gpuguard's own check, which apt calls before dpkg, that this is the window itself.
_OURS = {"GPUGUARD_APT_CHECK": "never"}
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
    """An empty log below ``LOGS_DIR``; the oldest ones go."""
    folder = host.make_dir(LOGS_DIR)
    old = sorted(folder.glob("upgrade-*.log"), key=lambda path: path.stat().st_mtime)
    for path in old[: -_KEEP + 1]:
        path.unlink(missing_ok=True)
    path = folder / f"upgrade-{name}.log"
    path.touch(mode=0o640)
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
    # Appended by a shell, so that the file is apt's own: no pipe that could break
    shell = ("sh", "-c", 'exec >>"$0" 2>&1 && exec "$@"', str(log.path))
    with HeldSignals() as held, _Follower(log.path, on_line, lambda: held.has_come, on_signal):
        done = host.run(
            *shell, *command, *words,
            timeout=_FOR_EVER, ok=None, env={**apt.environment(), **_OURS},
        )  # fmt: skip
    if done.exit_status == 0:
        return
    tail = "\n".join(log.path.read_text("utf-8", "replace").splitlines()[-_TAIL:])
    if any(_is_lock(line) for line in tail.splitlines()):
        raise LockHeldError(
            f"apt or dpkg is at work, still after {lock_timeout:g} s",
            hint="wait until it is done and try again; nothing was installed",
        )
    raise CommandError(
        f"apt-get exited with {done.exit_status}",
        code="apt-failed",
        hint=f"whole log: {log.inside}",
        detail=tail,
    )


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
    """Reads what is appended to a file, in a thread of its own."""

    def __init__(
        self,
        path: Path,
        on_line: Callable[[str], None],
        is_wanted_away: Callable[[], bool],
        on_signal: Callable[[], None],
    ) -> None:
        self._path, self._on_line = path, on_line
        self._is_wanted_away, self._on_signal = is_wanted_away, on_signal
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        told, rest = False, ""
        with self._path.open(encoding="utf-8", errors="replace") as file:
            while True:
                is_last = self._done.is_set()
                *lines, rest = (rest + file.read()).split("\n")
                for line in lines:
                    self._on_line(line)
                if is_last:
                    return
                if not told and self._is_wanted_away():
                    told = True
                    self._on_signal()
                time.sleep(_LOOK_AGAIN)
