"""Programs that talk to the driver: one at a time, with a deadline, and none beside a stuck one.

A process in uninterruptible sleep cannot be killed (CASES C49). Each program inherits the
descriptor of a lock, so the kernel itself keeps the lock for as long as any of them lives;
a record beside it says who it is, also to users who may not open the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from gpuguard.errors import CommandTimeoutError, ProbeError
from gpuguard.host.files import make_dirs, replace_atomically
from gpuguard.host.port import Completed, Deadline, Host
from gpuguard.state import RUN_DIR

_SCHEMA = 1
_GRACE = 0.15
_POLL_SECONDS = 0.05
_LOCK, _RECORD = "probe.lock", "probe-outstanding.json"


class OutstandingError(ProbeError):
    """An earlier probe of the driver has not come back, so no other is started."""

    code = "probe-outstanding"


class Guard:
    """Runs programs under the lock; see ``guarded``."""

    def __init__(self, host: Host, folder: Path | None, lock: int | None) -> None:
        self._host = host
        self._folder = folder
        self._lock = lock
        self._stuck: OutstandingError | None = None

    def run(
        self,
        *argv: str,
        timeout: float | Deadline,
        env: Mapping[str, str] = {},
        on_line: Callable[[str], None] | None = None,
        grace: float = _GRACE,
    ) -> Completed:
        """Run a program; its exit status is not judged.

        Args:
            *argv: program and arguments.
            timeout: see ``Host.run``.
            env: likewise.
            on_line: likewise.
            grace: likewise; a process with CUDA contexts takes seconds to die.

        Raises:
            OutstandingError: one that was run before hangs and cannot be killed.
            CommandNotFoundError, CommandTimeoutError: see ``Host.run``.
        """
        if self._stuck is not None:
            raise self._stuck
        descriptors = () if self._lock is None else (self._lock,)
        try:
            return self._host.run(
                *argv, timeout=timeout, env=env, ok=None, on_line=on_line, grace=grace,
                pass_fds=descriptors,
            )  # fmt: skip
        except CommandTimeoutError as error:
            if error.left:
                self._stuck = self._remember(error.left[0], argv)
            raise

    def _remember(self, pid: int, argv: tuple[str, ...]) -> OutstandingError:
        record = {
            "schema": _SCHEMA,
            "pid": pid,
            "started": _start_time(pid),
            "command": shlex.join(argv),
            "since": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if self._folder is not None:
            with suppress(OSError):
                text = json.dumps(record).encode()
                replace_atomically(self._folder / _RECORD, text, mode=0o644)
        return _outstanding(record)


@contextmanager
def guarded(host: Host, *, wait: float) -> Iterator[Guard]:
    """Hold the lock; wait for another gpuguard that asks the driver just now.

    Raises:
        OutstandingError: an abandoned process is still there, or the other one has not come
            to an end within ``wait`` seconds.
    """
    _refuse_if_alive(host.path(RUN_DIR))
    for folder in _folders(host):
        lock = _open_lock(folder)
        if lock is not None:
            break
    else:
        yield Guard(host, None, None)  # nowhere to write: a read-only root without a home
        return
    try:
        _refuse_if_alive(folder)
        _acquire(lock, folder, wait)
        with suppress(OSError):
            (folder / _RECORD).unlink(missing_ok=True)  # who is named there has ended
        yield Guard(host, folder, lock)
    finally:
        os.close(lock)


def _open_lock(folder: Path) -> int | None:
    try:
        make_dirs(folder)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    os.set_inheritable(lock, True)  # noqa: FBT003 - the programs hold it, too
    return lock


def _acquire(lock: int, folder: Path, wait: float) -> None:
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _refuse_if_alive(folder)
            if time.monotonic() >= deadline:
                raise OutstandingError(
                    f"another gpuguard has been asking the driver for more than {wait:g} s"
                ) from None
            time.sleep(_POLL_SECONDS)
        else:
            return


def _refuse_if_alive(folder: Path) -> None:
    try:
        record = json.loads((folder / _RECORD).read_bytes())
        pid, started = int(record["pid"]), record["started"]
        error = _outstanding(record)
    except (OSError, ValueError, KeyError, TypeError):
        return
    if started is not None and _start_time(pid) == started:
        raise error


def _outstanding(record: Mapping[str, object]) -> OutstandingError:
    return OutstandingError(
        f"probe outstanding since {record['since']}: {record['command']} (process "
        f"{record['pid']}) hangs in the driver and cannot be killed"
    )


def _start_time(pid: int) -> int | None:
    """In clock ticks since boot: with the pid it names one process for good; None: it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # proc(5): state, starttime


def _folders(host: Host) -> Iterator[Path]:
    """Where lock and record may be: the system's place for root, the user's own for others."""
    yield host.path(RUN_DIR)
    for variable, below in (
        ("XDG_RUNTIME_DIR", "gpuguard"),
        ("XDG_CACHE_HOME", "gpuguard"),
        ("HOME", ".cache/gpuguard"),
    ):
        if (base := os.environ.get(variable, "")).startswith("/"):
            yield Path(base) / below
