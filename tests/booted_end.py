"""The end of a booted system, also while somebody who was let in from outside is still at work."""

from __future__ import annotations

import subprocess
import time

import psutil


def wait_for_end(nspawn: subprocess.Popen[bytes], seconds: float) -> int:
    """Its exit status.

    At the end of a shutdown all that is left inside is stopped, then killed. nsenter of a child
    that is stopped stops, too, outside, where nobody goes on with it: the child stays a zombie, and
    the system never ends.

    Raises:
        subprocess.TimeoutExpired: it did not end.
    """
    deadline = time.monotonic() + seconds
    while (status := nspawn.poll()) is None:
        if time.monotonic() >= deadline:
            raise subprocess.TimeoutExpired(nspawn.args, seconds)
        for child in psutil.Process().children():
            if child.name() == "nsenter" and child.status() == psutil.STATUS_STOPPED:
                child.resume()
        time.sleep(0.1)
    return status
