"""Whether the engine answers that the front leads to: so cheap that it can be asked all the time.

For a process that stays: nothing is imported that reads lanes.
"""

from __future__ import annotations

import socket
import time

from gpuguard.host import Host
from gpuguard.host.reading import read_text
from gpuguard.serving.front_config import parse_route
from gpuguard.state import FRONT_FILE

_SECONDS = 2.0
_QUESTION = b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n"
_ENOUGH = len(b"HTTP/1.1 200")


def engine_answers(host: Host) -> bool | None:
    """Whether ``/health`` is 200; None: there is no front, so nobody says where.

    Raises:
        ProbeError: the front's file cannot be read.
    """
    route = parse_route(read_text(host, FRONT_FILE) or "")
    return None if route is None else _status(route.port) == b"200"


def _status(port: int) -> bytes:
    deadline = time.monotonic() + _SECONDS
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_SECONDS) as link:
            link.sendall(_QUESTION)
            while len(answer) < _ENOUGH and (left := deadline - time.monotonic()) > 0:
                link.settimeout(left)
                if not (piece := link.recv(_ENOUGH)):
                    break
                answer += piece
    except OSError:
        return b""
    return answer[9:12]
