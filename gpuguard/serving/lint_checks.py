"""Checks of single values of a lane that need more words than code. No I/O."""

from __future__ import annotations

from gpuguard.serving.lane import Lane
from gpuguard.serving.render import secrets_file

_ALL_OF_THIS_MACHINE = frozenset({"", "*", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound
_UTILIZATION = "gpu-memory-utilization"


def place_of_secrets(lane: Lane) -> str:
    """Where the engine of this backend takes a key from that others must not read."""
    if lane.engine.backend == "compose":
        return f"into {secrets_file(lane.name)}, root's with mode 0600: lines NAME=value"
    file = "into a file of mode 0600, named by EnvironmentFile= in "
    if lane.engine.backend == "quadlet":
        folder = f"/etc/containers/systemd/lane-{lane.name}.container.d"
        return f"{file}the [Container] section of {folder}/secret.conf (Podman 5 or newer)"
    return f"{file}a drop-in: systemctl edit {lane.unit}"


def utilization_problem(lane: Lane) -> str | None:
    """Why vLLM would end at once over its share of a card's memory."""
    given = lane.args.get(_UTILIZATION)
    share = lane.number(_UTILIZATION)
    if given is None or (share is not None and 0 < share <= 1):
        return None
    return f"{_UTILIZATION} is {given}: it is a share of a card's memory, above 0 and at most 1"


def loopback_port(listen: str) -> int | None:
    """The port of loopback that an address of the proxy takes; None: none, or not known."""
    address, _, port = listen.rpartition(":")
    address = address.strip("[]")
    is_taken = address in _ALL_OF_THIS_MACHINE or address in ("localhost", "127.0.0.1")
    return int(port) if is_taken and port.isdecimal() else None
