"""What the last ``gpuguard setup`` installed (``SETUP_FILE``): paths, and what they were then."""

from __future__ import annotations

import json
from typing import Any

from gpuguard.core.setup import Record
from gpuguard.errors import StateError
from gpuguard.host import Host
from gpuguard.state import SETUP_FILE

_SCHEMA = 1


def setup_bytes(record: Record) -> bytes:
    """The record as it is written."""
    files = [_entry(path, mark) for path, mark in sorted(record.marks.items())]
    document = {
        "schema": _SCHEMA,
        "created": record.created,
        "program": record.program,
        "account": record.account,
        "version": record.version,
        "files": files,
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def read_setup(host: Host) -> Record | None:
    """The record; None: nothing is set up.

    Raises:
        StateError: it is there and cannot be understood.
    """
    try:
        document: dict[str, Any] = json.loads(host.path(SETUP_FILE).read_bytes())
        if document["schema"] != _SCHEMA:
            raise ValueError(f"schema {document['schema']}")  # noqa: TRY301 - one reaction
        return Record(
            program=str(document["program"]),
            marks={str(entry["path"]): _mark(entry) for entry in document["files"]},
            created=str(document["created"]),
            account=document.get("account"),
            version=str(document.get("version", "")),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{SETUP_FILE} cannot be used: {error}",
            code="setup-unreadable",
            hint=f"move it away, and set up anew: mv {SETUP_FILE} /root/ && gpuguard setup",
        ) from error


def _entry(path: str, mark: str) -> dict[str, str]:
    kind, _, value = mark.partition(" ")
    if kind == "link":
        return {"path": path, "target": value}
    return {"path": path, "mode": kind, "sha256": value}


def _mark(entry: dict[str, Any]) -> str:
    if "target" in entry:
        return f"link {entry['target']}"
    return f"{entry['mode']} {entry['sha256']}"
