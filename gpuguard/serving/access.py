"""May the account of a venv engine run the engine and read the model?

Asked as that account: the folders above, groups and access lists count, and only the kernel knows
them all. A container's engine is root of its own.
"""

from __future__ import annotations

import os
import pwd

from gpuguard.errors import CommandError
from gpuguard.host import Host
from gpuguard.serving.lane import Lane

_SECONDS = 60.0


def access_problem(host: Host, lane: Lane) -> str | None:
    """What it cannot run or read; None: nothing, or it was not to be asked.

    What is not there at all, account, engine or model, is for others to say.
    """
    is_asked = lane.engine.backend == "venv" and os.geteuid() == 0 and host.is_live
    program = f"{lane.engine.venv}/bin/vllm"
    if not is_asked or not all(host.path(path).exists() for path in (program, lane.model.path)):
        return None
    try:
        account = pwd.getpwnam(lane.engine.user)
    except KeyError:
        return None
    try:
        return _look(host, account, program, lane.model.path)
    except CommandError as error:
        return f"what the account {lane.engine.user} can read is not known: {error.message}"


def _look(host: Host, account: pwd.struct_passwd, program: str, model: str) -> str | None:
    who = f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups", "--"
    runs = host.run("setpriv", *who, "test", "-x", program, timeout=_SECONDS, ok=None)
    if runs.exit_status != 0:
        return f"the account {account.pw_name} cannot run {program}"
    words = "find", "-L", model, "!", "-readable", "-print", "-quit"
    done = host.run("setpriv", *who, *words, timeout=_SECONDS, ok=None)
    if done.stdout.strip():
        return f"the account {account.pw_name} cannot read {done.stdout.splitlines()[0]}"
    if done.exit_status != 0:
        said = done.stderr.strip().split("\n")[0] or f"find: status {done.exit_status}"
        return f"the account {account.pw_name} cannot read the model: {said}"
    return None
