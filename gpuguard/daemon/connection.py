"""One connection of the daemon's server: it is opened, read, written, and closed for certain."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

from gpuguard.daemon.http import BadRequestError, Request, Response, encode, parse_head

MAX_HEAD_BYTES = 8192
HANDSHAKE_SECONDS = 5.0
HEAD_SECONDS = 5.0
IDLE_SECONDS = 180.0  # between two requests of one connection: longer than a scrape interval
WRITE_SECONDS = 10.0
CLOSE_SECONDS = 5.0
_ABORT_SECONDS = 1.0


class _Protocol(asyncio.StreamReaderProtocol):
    """``gone``: the client sends nothing any more; ``lost``: the socket is closed."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self.gone: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()

    def eof_received(self) -> bool | None:
        if not self.gone.done():
            self.gone.set_result(None)
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        for noted in (self.gone, self.lost):
            if not noted.done():
                noted.set_result(None)
        super().connection_lost(exc)


class Connection:
    """From accept until the socket is closed; ``tls`` is what it was accepted with."""

    def __init__(self, accepted: socket.socket, client: str, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        self.client = client
        self.tls = tls
        self.task: asyncio.Task[None] | None = None
        self.requests = 0
        self.is_idle = True  # no request has been read that is not answered
        self._socket = accepted
        self._is_begun = False
        self._reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES, loop=loop)
        self._protocol = _Protocol(self._reader, loop)
        self._writer: asyncio.StreamWriter | None = None

    @property
    def gone(self) -> asyncio.Future[None]:
        """Done once the client has closed its side."""
        return self._protocol.gone

    async def open(self) -> None:
        """The handshake, if there is one.

        Raises:
            OSError: there was none.
        """
        self._is_begun = True
        loop = asyncio.get_running_loop()
        limits = {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": CLOSE_SECONDS}
        transport, _ = await loop.connect_accepted_socket(
            lambda: self._protocol, self._socket, ssl=self.tls,
            **(limits if self.tls is not None else {}),
        )  # fmt: skip
        # What the client does not take is waited for, not kept; 0 would never go on with TLS.
        transport.set_write_buffer_limits(high=1, low=0)
        self._writer = asyncio.StreamWriter(transport, self._protocol, self._reader, loop)

    async def read(self) -> Request:
        """The next request.

        Raises:
            BadRequestError: it is none, too long, or too slow.
            asyncio.IncompleteReadError: the client has gone.
        """
        self.is_idle = True
        async with asyncio.timeout(IDLE_SECONDS):  # no task of its own, as wait_for makes
            first = await self._reader.read(1)
        if not first:
            raise asyncio.IncompleteReadError(b"", None)
        self.requests += 1
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                rest = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as error:
            raise BadRequestError(431) from error
        except TimeoutError as error:
            raise BadRequestError(408) from error
        self.is_idle = False
        return parse_head(first + rest)

    async def write(self, response: Response, *, keep: bool, head_only: bool = False) -> None:
        """Answer; until the kernel has all of it.

        Raises:
            OSError: the client does not take it.
        """
        if self._writer is None:
            raise ConnectionError("not open")
        self._writer.write(encode(response, keep=keep, head_only=head_only))
        async with asyncio.timeout(WRITE_SECONDS):
            await self._writer.drain()
        await asyncio.sleep(0)  # one that asks much does not keep others waiting

    async def close(self) -> None:
        """Close as one should, for as long as that takes no longer than it should."""
        if self._writer is not None:
            self._writer.close()
            await asyncio.wait({self._protocol.lost}, timeout=CLOSE_SECONDS)

    async def abort(self) -> None:
        """Close whatever the client does; returns when it is closed."""
        if self._writer is not None:
            self._writer.transport.abort()
            await asyncio.wait({self._protocol.lost}, timeout=_ABORT_SECONDS)
            return
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        await asyncio.sleep(0)

    def forget(self) -> None:
        """It has ended; perhaps before anything was done with it."""
        if not self._is_begun:
            self._socket.close()
