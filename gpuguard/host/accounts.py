"""Words before a command that make it another account's."""

from __future__ import annotations

from gpuguard.host.port import BuildUser


def as_user(user: BuildUser | None, *, dies_with_parent: bool = False) -> tuple[str, ...]:
    """Drop all rights but the account's own, for good.

    Args:
        user: the account; None: as this process.
        dies_with_parent: killed when the thread that started it ends, kill -9 included. Said
            here, because a change of account clears what was said before.
    """
    if user is None:
        return ()
    death = ("--pdeathsig=KILL",) if dies_with_parent else ()
    return (
        "setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", "--clear-groups",
        "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", *death, "--",
    )  # fmt: skip
