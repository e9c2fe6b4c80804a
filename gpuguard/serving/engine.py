"""Ask an engine over HTTP on loopback; every question has a deadline."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_SECONDS = 10.0
_MAX_BYTES = 8 << 20


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
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return Answer(response.status, response.read(_MAX_BYTES).decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, str(error) or type(error).__name__)
        finally:
            connection.close()

    def stream(
        self, path: str, body: dict[str, Any], *, timeout: float = _SECONDS
    ) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, up to ``[DONE]``.

        Raises:
            EngineError: it is no stream, or it ended before ``[DONE]``.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise EngineError(f"HTTP {response.status}", response.status)
            for line in response:
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
