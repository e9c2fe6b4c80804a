"""Kernels that the operator rolled back: runs that nobody started leave them alone.

One file per release, written and removed in the transaction of the rollback or rebuild itself.
"""

from __future__ import annotations

import json

from gpuguard.errors import StateError
from gpuguard.host import Host
from gpuguard.state import LEFT_ALONE_DIR

_SCHEMA = 1


def left_alone_file(release: str) -> str:
    """``left-alone/<release>.json``."""
    return f"{LEFT_ALONE_DIR}/{release}.json"


def encode_left_alone(release: str, since: str) -> bytes:
    """That an operator put something back into this kernel, and when (UTC, ISO 8601)."""
    return json.dumps({"schema": _SCHEMA, "release": release, "since": since}).encode() + b"\n"


def left_alone_since(host: Host, release: str) -> str | None:
    """When it was rolled back; None: it was not, or was rebuilt since.

    Raises:
        StateError: the file is there and cannot be read: it is not known what he wanted.
    """
    path = host.path(left_alone_file(release))
    try:
        document = json.loads(path.read_bytes())
        return str(document["since"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path} cannot be used: {error}",
            hint=f"remove it to have {release} rebuilt automatically again",
        ) from error
