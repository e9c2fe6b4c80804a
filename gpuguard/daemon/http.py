"""A small HTTP/1.1 server for a few pages that are ready: GET and HEAD, nothing from the disk.

Made for clients that mean no good, too: a limit for everything, and of many that dawdle those
that have dawdled longest are dropped first, so that a scrape always gets through.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

MAX_CONNECTIONS = 128
MAX_HEAD_BYTES = 8192
HEAD_SECONDS = 5.0
IDLE_SECONDS = 180.0  # between two requests of one connection: longer than a scrape interval
WRITE_SECONDS = 10.0
_HANDSHAKE_SECONDS = 5.0
_REASONS = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
    405: "Method Not Allowed", 408: "Request Timeout", 431: "Request Header Fields Too Large",
    503: "Service Unavailable", 505: "HTTP Version Not Supported",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """What a client wants; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    keep: bool = True  # the connection is to be used once more


@dataclass(frozen=True, slots=True)
class Response:
    """An answer that is ready."""

    status: int
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class BadRequestError(Exception):
    """What came is no request; ``status`` says how."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


Answer = Callable[[Request], Response]
Guard = Callable[[str], bool]


@dataclass(slots=True)
class Server:
    """Serves ``answer``; ``knows`` and ``check`` are of basic authentication, if there is any.

    ``knows`` is asked in the loop, ``check`` in a thread: it is slow.
    """

    answer: Answer
    knows: Guard | None = None
    check: Guard | None = None
    _waiting: dict[asyncio.StreamWriter, None] = field(default_factory=dict)  # oldest first
    _busy: int = 0

    async def start(self, address: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Server:
        """Listen.

        Raises:
            OSError: it cannot be listened there.
        """
        more = {} if tls is None else {"ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        return await asyncio.start_server(
            self._connected, address, port, ssl=tls, limit=MAX_HEAD_BYTES, backlog=MAX_CONNECTIONS,
            **more,
        )  # fmt: skip

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._make_room()
        try:
            with suppress(ConnectionError, ssl.SSLError, TimeoutError, asyncio.IncompleteReadError):
                while await self._serve_one(reader, writer):
                    pass
        finally:
            self._waiting.pop(writer, None)
            writer.close()

    def _make_room(self) -> None:
        while self._waiting and len(self._waiting) + self._busy >= MAX_CONNECTIONS:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self._waiting[writer] = None
        try:
            request = parse_head(await _read_head(reader))
        except BadRequestError as error:
            await _write(writer, Response(error.status), keep=False, head_only=False)
            return False
        finally:
            self._waiting.pop(writer, None)
        self._busy += 1
        try:
            response = await self._respond(request)
            await _write(writer, response, keep=request.keep, head_only=request.method == "HEAD")
        finally:
            self._busy -= 1
        return request.keep

    async def _respond(self, request: Request) -> Response:
        if self.knows is not None and self.check is not None:
            said = request.headers.get("authorization", "")
            if not self.knows(said) and not await asyncio.to_thread(self.check, said):
                asked = (("WWW-Authenticate", 'Basic realm="gpuguard", charset="UTF-8"'),)
                return Response(401, b"Unauthorized\n", headers=asked)
        if request.method not in ("GET", "HEAD"):
            return Response(405, b"Method Not Allowed\n", headers=(("Allow", "GET, HEAD"),))
        return self.answer(request)


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """Request line and header fields.

    Raises:
        BadRequestError: too long, or too slow.
        asyncio.IncompleteReadError: the client has gone.
    """
    first = await asyncio.wait_for(reader.read(1), IDLE_SECONDS)
    if not first:
        raise asyncio.IncompleteReadError(b"", None)
    try:
        rest = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_SECONDS)
    except asyncio.LimitOverrunError as error:
        raise BadRequestError(431) from error
    except TimeoutError as error:
        raise BadRequestError(408) from error
    return first + rest


def parse_head(head: bytes) -> Request:
    """Parse ``METHOD TARGET HTTP/1.x`` and the fields (RFC 9112); the query is dropped.

    Raises:
        BadRequestError: it is no request, or of another protocol.
    """
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[0].isalpha() or not words[0].isupper():  # noqa: PLR2004
        raise BadRequestError(400)
    method, target, version = words
    if version not in ("HTTP/1.0", "HTTP/1.1"):
        raise BadRequestError(505 if version.startswith("HTTP/") else 400)
    if not target.startswith("/"):
        raise BadRequestError(400)
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequestError(400)
        headers[name.lower()] = value.strip()
    # A body is not read, so what follows on this connection could be anything.
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    wish = headers.get("connection", "").lower()
    keep = "close" not in wish and (version == "HTTP/1.1" or "keep-alive" in wish)
    return Request(method, target.partition("?")[0], headers, keep and not has_body)


async def _write(
    writer: asyncio.StreamWriter, response: Response, *, keep: bool, head_only: bool
) -> None:
    body = response.body or f"{_REASONS[response.status]}\n".encode()
    fields = [
        ("Content-Type", response.kind),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("Connection", "keep-alive" if keep else "close"),
        *response.headers,
    ]
    head = f"HTTP/1.1 {response.status} {_REASONS[response.status]}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in fields) + "\r\n"
    writer.write(head.encode("latin-1") + (b"" if head_only else body))
    try:
        await asyncio.wait_for(writer.drain(), WRITE_SECONDS)
    except TimeoutError:
        writer.transport.abort()
        raise
