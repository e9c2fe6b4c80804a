"""The last P2P state that the operator called right: ``gpuguard verify --accept``.

One JSON file with a schema number; written atomically, read tolerantly. A file that cannot be
read is an error: taken for absent, a lost card would go unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gpuguard.core.expectation import Expectation, Origin
from gpuguard.core.facts import Gpu
from gpuguard.errors import PrivilegeError, StateError
from gpuguard.host import Host
from gpuguard.state import ACCEPTED_FILE

_SCHEMA = 1
_MAX_BYTES = 1 << 20


def read_accepted(host: Host) -> Expectation | None:
    """What was accepted, or None if nothing ever was.

    Raises:
        StateError: there is a file and it cannot be read.
    """
    try:
        with host.path(ACCEPTED_FILE).open("rb") as file:
            content = file.read(_MAX_BYTES)
        return _decode(json.loads(content))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(
            f"{ACCEPTED_FILE} cannot be read: {error}",
            hint="remove it, look at gpuguard verify, then: gpuguard verify --accept",
        ) from error


def write_accepted(
    host: Host, gpus: Sequence[Gpu], pairs: Sequence[tuple[str, str]], *, now: str
) -> Expectation:
    """Keep these cards, and these ordered pairs between them (UUIDs), as what is right.

    Raises:
        PrivilegeError, StateError: the file cannot be written.
    """
    document = {
        "schema": _SCHEMA,
        "accepted": now,
        "gpus": [
            {"uuid": gpu.uuid, "pci_bus_id": gpu.pci_bus_id, "name": gpu.name} for gpu in gpus
        ],
        "pairs": [{"src": src, "dst": dst} for src, dst in pairs],
    }
    try:
        host.replace_file(ACCEPTED_FILE, json.dumps(document, indent=1).encode() + b"\n")
    except PermissionError as error:
        raise PrivilegeError(
            f"{ACCEPTED_FILE} cannot be written: {error.strerror}", hint="run it as root"
        ) from error
    except OSError as error:
        raise StateError(
            f"{ACCEPTED_FILE} cannot be written: {error.strerror}",
            code="state-unwritable",
            hint="see that the disk is writable and not full",
        ) from error
    return _decode(document)


def _decode(document: Any) -> Expectation:
    if document["schema"] != _SCHEMA:
        raise ValueError(f"its schema is {document['schema']}, this version knows {_SCHEMA}")
    gpus = document["gpus"]
    return Expectation(
        origin=Origin.ACCEPTED,
        count=len(gpus),
        cards=tuple(str(gpu["uuid"]) for gpu in gpus),
        pairs=tuple((str(pair["src"]), str(pair["dst"])) for pair in document["pairs"]),
        since=str(document.get("accepted", "")),
        places=tuple((str(gpu["uuid"]), str(gpu.get("pci_bus_id", ""))) for gpu in gpus),
    )
