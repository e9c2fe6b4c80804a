"""Configuration of the proxy before the lanes (HAProxy). No I/O.

One stable address, one server behind it: the lane that serves. Its state and port are changed at
run time through the admin socket, so that no connection is dropped by a reload; the file is
written first, so that a proxy that starts again does the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.state import FRONT_SOCKET

PROXY = "gpuguard_front"
BACKEND = "gpuguard_lane"
SERVER = "engine"
UNIT = "gpuguard-front.service"
_ROUTE = re.compile(
    rf"^\s*server {SERVER} 127\.0\.0\.1:(?P<port>\d+)\b(?P<rest>[^\n]*)$", re.MULTILINE
)
_BIND = re.compile(r"^\s*bind (?P<address>\S+)$", re.MULTILINE)
_BODY = (
    '{"error": {"message": "No lane is ready; try again later.", '
    '"type": "service_unavailable", "code": 503}}'
)
#: SRV_ADMF_FMAINT, _IMAINT, _RMAINT, _HMAINT of HAProxy's server-t.h; _CMAINT (0x04) only tells
#: that the file once said "disabled", and stays.
_MAINT = 0x01 | 0x02 | 0x20 | 0x40


@dataclass(frozen=True, slots=True)
class Route:
    """Where traffic goes; ``is_open`` False: it is answered with 503."""

    port: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the running proxy says of its server; ``is_up``: its health check passes."""

    port: int
    in_maintenance: bool
    is_up: bool


def render_front(listen: str, retry_after: int, route: Route) -> str:
    """The whole configuration."""
    state = "" if route.is_open else " disabled"
    return f"""# Made by gpuguard: the one address of the lanes. Written anew at each switch.
global
    stats socket {FRONT_SOCKET} mode 600 level admin
    maxconn 4096

defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    timeout http-request 30s
    timeout http-keep-alive 60s
    timeout queue 1s
    option redispatch 0
    retries 0

frontend {PROXY}
    bind {listen}
    default_backend {BACKEND}

backend {BACKEND}
    option httpchk
    http-check send meth GET uri /health
    http-check expect status 200
    http-error status 503 content-type application/json string '{_BODY}' hdr Retry-After {retry_after}
    default-server inter 2s fastinter 500ms downinter 1s fall 2 rise 1 init-addr last,libc,none
    server {SERVER} 127.0.0.1:{route.port} check{state}
"""  # noqa: E501 - one directive


def parse_route(text: str) -> Route | None:
    """Where a configuration sends traffic; None: it is none of ours."""
    match = _ROUTE.search(text)
    if match is None:
        return None
    return Route(int(match["port"]), "disabled" not in match["rest"].split())


def parse_listen(text: str) -> str | None:
    """The address that a configuration listens on."""
    match = _BIND.search(text)
    return match["address"] if match else None


def commands(route: Route) -> tuple[str, ...]:
    """What makes a running proxy do the same as the file."""
    name = f"{BACKEND}/{SERVER}"
    if not route.is_open:
        return (f"set server {name} state maint",)
    # in maintenance first: no request may go to the new port before it is asked for its health
    return (
        f"set server {name} state maint",
        f"set server {name} addr 127.0.0.1 port {route.port}",
        f"set server {name} state ready",
    )


def parse_servers_state(text: str) -> ServerState | None:
    """The answer of ``show servers state``; None: our server is not in it."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    head = next((row[1:] for row in rows if row[:2] == ["#", "be_id"]), None)
    for row in rows:
        values = dict(_named(head, row)) if head else {}
        if (values.get("be_name"), values.get("srv_name")) == (BACKEND, SERVER):
            try:
                return ServerState(
                    port=int(values["srv_port"]),
                    in_maintenance=bool(int(values["srv_admin_state"]) & _MAINT),
                    is_up=int(values["srv_op_state"]) > 0,
                )
            except (KeyError, ValueError):
                return None
    return None


def _named(head: list[str], row: list[str]) -> Iterator[tuple[str, str]]:
    if row[:1] != ["#"]:
        yield from zip(head, row, strict=False)
