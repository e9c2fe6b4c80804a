"""Ask an engine over HTTP on loopback; every question has a deadline.

For the whole of it, on the monotonic clock: an engine that sends a byte now and then, or events
without end, must not hold up whoever waits with the lock in hand and no traffic. What it may send
is limited as well.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_SECONDS = 10.0
_MAX_BYTES = 8 << 20
_MAX_LINE = 1 << 20
_MAX_LINES = 100_000  # of a stream: two for each token, and some to keep it alive
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """Status 0: nobody answered; ``text`` then says why."""

    status: int
    text: str

    @property
    def document(self) -> Any:
        """The body as JSON; None: it is none."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None


class EngineError(Exception):
    """The engine did not answer to the end; ``status`` 0: there is no HTTP answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _Socket(socket.socket):
    """A socket whose deadline is for all that is sent and received through it."""

    deadline = 0.0

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    def sendall(self, *args: Any) -> None:
        self.settimeout(self._left())
        super().sendall(*args)

    def recv_into(self, *args: Any, **more: Any) -> int:
        self.settimeout(self._left())
        return super().recv_into(*args, **more)


class _Connection(http.client.HTTPConnection):
    """To loopback, with one deadline for everything."""

    def __init__(self, port: int, seconds: float) -> None:
        super().__init__("127.0.0.1", port)
        self._deadline = time.monotonic() + seconds

    def connect(self) -> None:
        link = _Socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            link.deadline = self._deadline
            link.settimeout(max(0.001, self._deadline - time.monotonic()))
            link.connect((self.host, self.port))
        except OSError:
            link.close()
            raise
        self.sock = link


class Engine:
    """One engine on a port of 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str, *, timeout: float = _SECONDS) -> Answer:
        """One GET."""
        return self._ask("GET", path, None, timeout)

    def post(self, path: str, body: dict[str, Any], *, timeout: float = _SECONDS) -> Answer:
        """One POST of JSON."""
        return self._ask("POST", path, body, timeout)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Answer:
        connection = _Connection(self._port, timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = _body(response)
            if len(content) > _MAX_BYTES:
                return Answer(0, f"the answer is longer than {_MAX_BYTES >> 20} MiB")
            return Answer(response.status, content.decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, str(error) or type(error).__name__)
        finally:
            connection.close()

    def stream(
        self, path: str, body: dict[str, Any], *, timeout: float = _SECONDS
    ) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, up to ``[DONE]``.

        Raises:
            EngineError: it is no stream, is too long, or did not come to ``[DONE]`` in time.
        """
        connection = _Connection(self._port, timeout)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise EngineError(f"HTTP {response.status}", response.status)
            for line in _lines(response):
                text = line.decode("utf-8", "replace").strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data: "):
                    with suppress(ValueError):
                        yield json.loads(text[6:])
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(str(error) or type(error).__name__) from error
        finally:
            connection.close()
        raise EngineError("the stream ended early")


def _body(response: http.client.HTTPResponse) -> bytes:
    """All of it, or a little more than the most that is taken."""
    content = bytearray()
    while len(content) <= _MAX_BYTES and (piece := response.read(_PIECE)):
        content += piece
    return bytes(content)


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    size = 0
    for _ in range(_MAX_LINES):
        line = response.readline(_MAX_LINE + 1)
        size += len(line)
        if len(line) > _MAX_LINE or size > _MAX_BYTES:
            raise EngineError("the stream is too long, or has a line without end")
        if not line:
            return
        yield line
    raise EngineError(f"the stream has more than {_MAX_LINES} lines")
