"""A boot file written anew by the tool that its host has for it."""

from __future__ import annotations

import shlex

from gpuguard.apply.leftover import run_tool
from gpuguard.errors import CommandError, VerifyError
from gpuguard.host import Host
from gpuguard.host.files import fsync_file


def run_own_tool(
    host: Host, path: str, command: tuple[str, ...], *, timeout: float, code: str, failed: str
) -> None:
    """Run the tool that writes ``path``, and have the result on disk.

    These tools have no flag for another root, and must run with that root's own configuration:
    the one place where a chroot is the right thing.

    Args:
        host: whose file it is.
        path: the file, inside the host.
        command: what to run inside the host.
        timeout: seconds.
        code: of the error.
        failed: what is said of ``path`` when it did not work.

    Raises:
        VerifyError: the tool failed.
    """
    enter = () if host.is_live else ("chroot", str(host.root))
    try:
        run_tool(host, *enter, *command, timeout=timeout)
    except CommandError as error:
        raise VerifyError(
            f"{path} {failed}: {error.message}",
            code=code,
            hint=f"see what it says by hand: {shlex.join(command)}",
            detail=error.detail,
        ) from error
    fsync_file(host.path(path))
