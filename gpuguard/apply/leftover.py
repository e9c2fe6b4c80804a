"""depmod and initramfs tools that outlive a killed gpuguard, with all that they started.

``--pdeathsig`` reaches only the program itself, not its children. So everything that a tool
starts inherits a file of ours, opened for it alone: whoever still has it open is ended before
anything is undone. That needs no supervisor that could be killed, too, and no namespaces.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuguard.errors import LockHeldError
from gpuguard.host import Host
from gpuguard.host.port import Completed
from gpuguard.state import JOURNAL_FILE, STATE_DIR

_FILE = f"{STATE_DIR}/tools"
_POLL_SECONDS = 0.02
_SECONDS = 10.0  # for those that were killed, to be gone


def run_tool(host: Host, *argv: str, timeout: float) -> Completed:
    """Run a program that writes to the host; it and all that it starts can be found again.

    Raises:
        CommandError: see ``Host.run``.
    """
    with _marked(host) as marks:
        return host.run(
            "setpriv", "--pdeathsig", "KILL", *argv, timeout=timeout, pass_fds=marks
        )  # fmt: skip


def end_left_over(host: Host) -> None:
    """Kill what is left of the tools of an earlier run, and wait until it is gone.

    Raises:
        LockHeldError: it cannot be killed.
    """
    path = host.path(_FILE)
    deadline = time.monotonic() + _SECONDS
    while left := _holders(path):
        if time.monotonic() >= deadline:
            raise LockHeldError(
                f"what an interrupted gpuguard started cannot be ended: process {left[0]}",
                hint=f"see what it waits for: ps -o pid,stat,wchan,args -p {left[0]}",
            )
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    host.remove_file(_FILE)


@contextmanager
def _marked(host: Host) -> Iterator[tuple[int, ...]]:
    if not host.path(JOURNAL_FILE).exists():
        yield ()  # not part of a change: nobody would look for it
        return
    descriptor = os.open(host.path(_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.set_inheritable(descriptor, True)  # noqa: FBT003
        yield (descriptor,)
    finally:
        os.close(descriptor)


def _holders(path: Path) -> list[int]:
    try:
        wanted = path.stat()
    except FileNotFoundError:
        return []
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            with suppress(OSError):  # gone, or not ours to look at
                if any(_is_same(entry, wanted) for entry in (process / "fd").iterdir()):
                    found.append(int(process.name))
    return found


def _is_same(descriptor: Path, wanted: os.stat_result) -> bool:
    with suppress(OSError):
        # the link first: to stat what is behind it may hang on a dead network disk
        if descriptor.readlink().name == Path(_FILE).name:
            return os.path.samestat(descriptor.stat(), wanted)
    return False
