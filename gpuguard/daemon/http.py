"""HTTP/1.1 as far as a few pages that are ready need it: requests, and answers as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_REASONS = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
    405: "Method Not Allowed", 408: "Request Timeout", 431: "Request Header Fields Too Large",
    500: "Internal Server Error", 503: "Service Unavailable", 505: "HTTP Version Not Supported",
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
    keep: bool = True  # False: the connection ends with this answer


class BadRequestError(Exception):
    """What came is no request; ``status`` says how."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


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


def encode(response: Response, *, keep: bool, head_only: bool) -> bytes:
    """An answer as it goes over the wire."""
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
    return head.encode("latin-1") + (b"" if head_only else body)
