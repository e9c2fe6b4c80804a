"""Programs that may hang: their output in memory files, and none of them left behind.

Output in a pipe would have to be waited for as long as anybody holds it open, also a child
that the program forked; a memory file is read when the program has ended. A second pipe, of
which all of them inherit the writing end, tells whether anybody is left, even in a session
of its own.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_POLL_SECONDS = 0.005
_MAX_OUTPUT = 16 << 20  # of a tool that prints without end; its next write fails


class Leash:
    """Holds the processes of one run; use it as a context manager.

    ``out`` and ``err`` are descriptors for the program's output, ``holder`` one that it has to
    inherit. Call ``started`` once it has.
    """

    def __init__(self) -> None:
        self.out, self.err = _memory_file(), _memory_file()
        self._look, self.holder = os.pipe()
        os.set_inheritable(self.holder, True)  # noqa: FBT003
        self._open = {self.out, self.err, self._look, self.holder}

    def __enter__(self) -> Leash:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open:
            os.close(descriptor)

    def started(self) -> None:
        """Let go of our copy of ``holder``, so that only theirs are left."""
        self._open.discard(self.holder)
        os.close(self.holder)

    def anyone_left(self) -> bool:
        """True while a process of this run, or one that it forked, is there."""
        poll = select.poll()
        poll.register(self._look, 0)  # a hang-up is reported unasked
        return not poll.poll(0)

    def pull_in(self, grace: float) -> tuple[int, ...]:
        """Kill who is left, whatever group or session they have gone to.

        The answer: those who are there nevertheless, ``grace`` seconds later.
        """
        deadline = time.monotonic() + grace
        if self.anyone_left():
            for pid in self.pids():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        while self.anyone_left():
            if time.monotonic() >= deadline:
                return self.pids()
            time.sleep(_POLL_SECONDS)
        return ()

    def pids(self) -> tuple[int, ...]:
        """The processes that are left; without those that we may not look at."""
        pipe = f"pipe:[{os.fstat(self._look).st_ino}]"
        return tuple(pid for pid in _all_pids() if pid != os.getpid() and _holds(pid, pipe))

    def stdout(self) -> str:
        """What has been printed."""
        return _content(self.out)

    def stderr(self) -> str:
        """What has been printed there."""
        return _content(self.err)


def _memory_file() -> int:
    descriptor = os.memfd_create("gpuguard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, _MAX_OUTPUT)  # sparse: costs nothing
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return descriptor


def _content(descriptor: int) -> str:
    # The position is shared with the writers: how much they have written.
    length = os.lseek(descriptor, 0, os.SEEK_CUR)
    return os.pread(descriptor, length, 0).decode("utf-8", "replace")


def _all_pids() -> Iterator[int]:
    yield from (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _holds(pid: int, pipe: str) -> bool:
    # Links only: reading a stuck process's cmdline or environ may hang like the process itself.
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(descriptor) == pipe:  # noqa: PTH115 - no path behind it
                    return True
    return False
