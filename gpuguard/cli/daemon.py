"""The daemon's own process, which ``gpuguard serve`` becomes.

What the command line needs (typer, pydantic) would stay in memory for as long as the daemon runs,
15 MB of it: so it is left behind by executing this.
"""

from __future__ import annotations

import json
import os
import sys

from gpuguard.daemon.looker import StoppableHost
from gpuguard.daemon.loop import Daemon
from gpuguard.errors import GpuguardError


def main() -> None:
    """Serve; the one argument is ``{"root", "config_file", "listen"}``."""
    wanted = json.loads(sys.argv[1])
    daemon = Daemon(StoppableHost(wanted["root"]), wanted["config_file"], wanted["listen"])
    status = 0
    try:
        daemon.run()
        status = daemon.exit_status
    except GpuguardError as error:
        status = error.exit_status
        _report(error)
    sys.stderr.flush()
    os._exit(status)  # threads that hang in the kernel, or check a password, must not keep it


def _report(error: GpuguardError) -> None:
    lines = [f"gpuguard: {error.message} [{error.code}]"]
    lines += [f"  | {line}" for line in error.detail.splitlines()]
    lines += [f"  -> {line}" for line in error.hint.splitlines()]
    print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201 - typer is left behind


if __name__ == "__main__":
    main()
