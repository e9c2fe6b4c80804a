"""A small server for a few pages that are ready: GET and HEAD, nothing from the disk.

Made for clients that mean no good, too: a limit for everything. A connection counts from accept
until its socket is closed, and of many those that have done nothing for longest are dropped
first, so that a scrape always gets through.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from gpuguard.daemon.connection import Connection
from gpuguard.daemon.http import BadRequestError, Request, Response

MAX_CONNECTIONS = 128
MAX_REQUESTS = 1000  # of one connection
_ACCEPT_AGAIN_SECONDS = 0.5
_STOP_SECONDS = 0.5
_UNAUTHORIZED = Response(
    401,
    b"Unauthorized\n",
    headers=(("WWW-Authenticate", 'Basic realm="gpuguard", charset="UTF-8"'),),
)
_TOO_MANY = Response(
    503, b"too many passwords to check\n", headers=(("Retry-After", "5"),), keep=False
)
_NOT_ALLOWED = Response(405, b"Method Not Allowed\n", headers=(("Allow", "GET, HEAD"),))


class Guard(Protocol):
    """Who may see the pages; asked with what a request has as ``Authorization``."""

    def knows(self, header: str) -> bool | None:
        """At once; None: it has to be checked."""

    def submit(self, header: str, client: str) -> Future[bool] | None:
        """Have it checked; None: too much is being checked."""


@dataclass(slots=True)
class Server:
    """Serves ``answer``; ``guard`` and ``tls`` count for what comes from now on."""

    answer: Callable[[Request], Response]
    guard: Guard | None = None
    tls: ssl.SSLContext | None = None
    _open: set[Connection] = field(default_factory=set)
    _waiting: dict[Connection, None] = field(default_factory=dict)  # of those; oldest first
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _listening: dict[socket.socket, asyncio.Task[None]] = field(default_factory=dict)

    async def start(self, address: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: it cannot be listened there.
            OverflowError: there is no such port.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, _, _, _, where in dict.fromkeys(found):
                listening = socket.create_server(
                    (str(where[0]), int(where[1])), family=family, backlog=MAX_CONNECTIONS
                )
                listening.setblocking(False)  # noqa: FBT003 - a flag alone
                self._listening[listening] = loop.create_task(self._accept(listening))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close everything, answered or not."""
        tasks = [*self._listening.values(), *(c.task for c in self._open if c.task is not None)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_SECONDS)
        for listening in self._listening:
            listening.close()
        self._listening.clear()

    @property
    def connections(self) -> int:
        """How many there are, those that are being closed among them."""
        return len(self._open)

    def use_tls(self, context: ssl.SSLContext) -> None:
        """For new connections; who was let in with another one has to come again."""
        self.tls = context
        for connection in tuple(self._waiting):
            if connection.is_idle:
                self._drop(connection)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except OSError as error:  # no descriptor is left, or no memory
                how = {"message": "a connection cannot be accepted", "exception": error}
                loop.call_exception_handler(how)
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                continue
            try:
                await self._make_room()
            except BaseException:
                accepted.close()
                raise
            with suppress(OSError):  # answers are written whole
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(accepted, str(peer[0]) if peer else "", self.tls)
            self._open.add(connection)
            self._waiting[connection] = None
            connection.task = loop.create_task(self._serve(connection))
            connection.task.add_done_callback(partial(self._ended, connection))
            await asyncio.sleep(0)  # many that come must not keep those that are here waiting

    async def _make_room(self) -> None:
        while len(self._open) >= MAX_CONNECTIONS:
            self._freed.clear()
            if self._waiting:
                self._drop(next(iter(self._waiting)))
            await self._freed.wait()

    def _drop(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        if connection.task is not None:
            connection.task.cancel()

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.open()
            while await self._serve_one(connection):
                # it has been answered: now others have waited longer
                self._waiting.pop(connection, None)
                self._waiting[connection] = None
            await connection.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # gone, too slow, or dropped
        except Exception as error:  # noqa: BLE001 - a mistake of ours ends one connection
            how = {"message": "a connection ends", "exception": error}
            asyncio.get_running_loop().call_exception_handler(how)
        finally:
            await connection.abort()

    def _ended(self, connection: Connection, _: asyncio.Task[None]) -> None:
        connection.forget()
        self._waiting.pop(connection, None)
        self._open.discard(connection)
        self._freed.set()

    async def _serve_one(self, connection: Connection) -> bool:
        try:
            request = await connection.read()
        except BadRequestError as error:
            await connection.write(Response(error.status), keep=False)
            return False
        response = await self._respond(connection, request)
        keep = (
            request.keep
            and response.keep
            and connection.requests < MAX_REQUESTS
            and connection.tls is self.tls
        )
        await connection.write(response, keep=keep, head_only=request.method == "HEAD")
        return keep

    async def _respond(self, connection: Connection, request: Request) -> Response:
        if self.guard is not None:
            is_allowed = await self._ask(self.guard, connection, request)
            if not is_allowed:
                return _TOO_MANY if is_allowed is None else _UNAUTHORIZED
        if request.method not in ("GET", "HEAD"):
            return _NOT_ALLOWED
        return self.answer(request)

    async def _ask(self, guard: Guard, connection: Connection, request: Request) -> bool | None:
        said = request.headers.get("authorization", "")
        if (known := guard.knows(said)) is not None:
            return known
        if (work := guard.submit(said, connection.client)) is None:
            return None
        # There are few of these, so none of them need be dropped; one that goes is not waited for.
        self._waiting.pop(connection, None)
        checked = asyncio.wrap_future(work)
        try:
            either: set[asyncio.Future[Any]] = {checked, connection.gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not checked.done():
                raise ConnectionResetError
            return checked.result()
        finally:
            checked.cancel()
            self._waiting[connection] = None
