"""Hold a reboot back through logind, for as long as this process holds a descriptor.

Two locks, since neither does alone what is wanted. *Block*: logind refuses, and its message
names who and why; root is only asked from systemd 257 on. *Delay*: also root's reboot waits,
for at most logind's InhibitDelayMaxSec. The kernel closes the descriptors with the process,
so that nothing is left behind by a crash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

#: logind's own folder: there from its start to its end.
_LOGIND = Path("/run/systemd/inhibit")
_ANSWER_SECONDS = 5.0
_WHAT = "shutdown"
_WHO = "gpuguard"


@contextmanager
def reboot_held(why: str) -> Iterator[bool]:
    """Take both locks; True if logind gave at least one.

    A machine without logind (a chroot, a container, an image) has nobody to ask; that, and a
    logind that does not answer, is no reason not to build.

    Args:
        why: what logind tells those who want to reboot.
    """
    with ExitStack() as stack:
        taken = 0
        if _LOGIND.is_dir():
            for mode in ("block", "delay"):
                with suppress(Exception):  # whatever the bus says; see above
                    stack.callback(os.close, _inhibit(mode, why))
                    taken += 1
        yield taken > 0


def _inhibit(mode: str, why: str) -> int:
    """Call org.freedesktop.login1.Manager.Inhibit; the descriptor is the lock."""
    from jeepney import DBusAddress, new_method_call
    from jeepney.io.blocking import open_dbus_connection

    manager = DBusAddress(
        "/org/freedesktop/login1",
        bus_name="org.freedesktop.login1",
        interface="org.freedesktop.login1.Manager",
    )
    call = new_method_call(manager, "Inhibit", "ssss", (_WHAT, _WHO, why, mode))
    with open_dbus_connection(bus="SYSTEM", enable_fds=True) as connection:
        reply = connection.send_and_get_reply(call, timeout=_ANSWER_SECONDS)
        return int(reply.body[0].to_raw_fd())
