"""The proxy before the lanes: its file, and its admin socket."""

from __future__ import annotations

import socket
from collections.abc import Callable

from gpuguard.errors import GpuguardError
from gpuguard.host import Host
from gpuguard.host.reading import read_text
from gpuguard.serving.front_config import (
    UNIT,
    Route,
    ServerState,
    commands,
    parse_listen,
    parse_route,
    parse_servers_state,
    render_front,
)
from gpuguard.state import FRONT_FILE, FRONT_SOCKET

_SECONDS = 5.0
_MAX_BYTES = 1 << 20
_FILE_MODE = 0o644


class FrontError(GpuguardError):
    """The proxy does not do what it was told."""

    code = "front-down"
    exit_status = 69


class FrontUnknownError(FrontError):
    """Whoever asks may not ask the proxy: that says nothing about it."""

    code = "front-unknown"
    exit_status = 3


class Front:
    """The proxy; ``retry_after`` is what it tells those who come while no lane is ready."""

    def __init__(self, host: Host, retry_after: int) -> None:
        self._host = host
        self._retry_after = retry_after

    def is_installed(self) -> bool:
        """Whether there is a front at all.

        Raises:
            ProbeError: it cannot be seen.
        """
        return read_text(self._host, FRONT_FILE) is not None

    def route(self) -> Route | None:
        """Where its file sends traffic."""
        return parse_route(read_text(self._host, FRONT_FILE) or "")

    def listen(self) -> str | None:
        """The address for clients."""
        return parse_listen(read_text(self._host, FRONT_FILE) or "")

    def state(self) -> ServerState:
        """What the running proxy does.

        Raises:
            FrontError: it does not answer.
            FrontUnknownError: we may not ask.
        """
        state = parse_servers_state(self._tell("show servers state"))
        if state is None:
            raise _down("it has no server for the lanes")
        return state

    def set_route(self, route: Route) -> None:
        """Send traffic there; in the file first, then in the running proxy, then look.

        Raises:
            FrontError: the running proxy does something else; the file is right.
            OSError: the file cannot be written. To open, the running proxy was told all the same:
                clients are served, until it is started anew.
        """
        text = read_text(self._host, FRONT_FILE) or ""
        listen = parse_listen(text)
        if listen is None:
            raise _down(f"{FRONT_FILE} is none of ours")
        new = render_front(listen, self._retry_after, route)
        unwritten = None
        try:
            if new != text:
                self._host.replace_file(FRONT_FILE, new.encode(), mode=_FILE_MODE)
        except OSError as error:
            if not route.is_open:
                raise
            unwritten = error
        for command in commands(route):
            self._tell(command)
        state = self.state()
        wrong = state.in_maintenance is route.is_open
        if wrong or (route.is_open and state.port != route.port):
            raise _down(f"it does not do what its file says: {state}")
        if unwritten is not None:
            raise unwritten

    def _tell(self, command: str) -> str:
        chunks: list[bytes] = []
        try:
            path = str(self._host.path(FRONT_SOCKET))
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.settimeout(_SECONDS)
                link.connect(path)
                link.sendall(command.encode() + b"\n")
                while sum(map(len, chunks)) < _MAX_BYTES and (chunk := link.recv(1 << 16)):
                    chunks.append(chunk)
        except PermissionError as error:
            raise FrontUnknownError(
                f"what the front does is not known: {FRONT_SOCKET}: {error.strerror}",
                hint="run it as root",
            ) from error
        except OSError as error:
            raise _down(f"{FRONT_SOCKET}: {error.strerror or error}") from error
        return b"".join(chunks).decode("utf-8", "replace")


def quietly(action: Callable[[], None]) -> str | None:
    """Do it; what went wrong as text instead of an error."""
    try:
        action()
    except FrontError as error:
        return f"{error.message}; {error.hint}"
    except OSError as error:
        return f"{FRONT_FILE} cannot be written: {error.strerror}"
    return None


def _down(why: str) -> FrontError:
    return FrontError(
        f"the front does not answer or obey: {why}",
        hint=f"systemctl status {UNIT}; systemctl restart {UNIT}",
    )
