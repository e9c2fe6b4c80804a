"""The last ``verify --deep`` over all cards: kept, so that its figures have metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from gpuguard.errors import StateError
from gpuguard.host import Host
from gpuguard.host.reading import read_bytes
from gpuguard.state import DEEP_FILE, STATE_DIR

_SCHEMA = 1


def keep_deep_record(host: Host, deep: Mapping[str, Any]) -> bool:
    """Keep the document of a deep check; False: it was not.

    Not on a host that gpuguard does not look after, where it must leave nothing behind, and not
    where this account may not write: nobody shows metrics of those.
    """
    if not host.path(STATE_DIR).is_dir():
        return False
    document = {"schema": _SCHEMA, "when": round(time.time(), 3), "deep": deep}
    try:
        host.replace_file(DEEP_FILE, json.dumps(document, indent=1).encode() + b"\n")
    except OSError:
        return False
    return True


def read_deep_record(host: Host) -> tuple[float, Mapping[str, Any]] | None:
    """When it was, and its document; None: there was none.

    Raises:
        ProbeError: it cannot be read.
        StateError: it cannot be used.
    """
    content = read_bytes(host, DEEP_FILE)
    if content is None:
        return None
    try:
        document = json.loads(content)
        known = {_SCHEMA: document}[document["schema"]]
        return float(known["when"]), dict(known["deep"])
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{DEEP_FILE} cannot be used: {error}", hint="run gpuguard verify --deep once more"
        ) from error
