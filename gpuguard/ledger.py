"""The ledger of holds, and what they were last seen to withhold.

JSON with a schema number, written atomically, readable by all. A ledger that cannot be read, or
that others than root can write, is an error: taken for empty, our holds would look foreign and
could never be lifted; believed, it would make root lift what is not ours.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuguard.core.holds import Ledger, LedgerEntry, Withheld, WithheldRecord
from gpuguard.errors import PrivilegeError, StateError
from gpuguard.host import Host
from gpuguard.host.files import writable_by_others
from gpuguard.state import HOLDS_FILE, WITHHELD_FILE

_SCHEMA = 1
_MAX_BYTES = 4 << 20
# deb-control(5); what dpkg is told one name a line must not contain a line of its own
_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]*(:[a-z0-9-]+)?")


def read_ledger(host: Host) -> Ledger | None:
    """Which holds are ours, or None if gpuguard never held anything here.

    Raises:
        StateError: it is there and cannot be read, or others than root can write it.
    """
    document = _load(host, HOLDS_FILE)
    if document is None:
        return None
    try:
        return Ledger(
            active=bool(document["active"]),
            packages={
                _name(name): LedgerEntry(
                    since=str(entry["since"]),
                    version=str(entry["version"]),
                    asked=bool(entry.get("asked", False)),
                )
                for name, entry in document["packages"].items()
            },
            lifted=tuple(_name(name) for name in document.get("lifted", ())),
            exempt=tuple(_name(name) for name in document.get("exempt", ())),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _unreadable(HOLDS_FILE, f"lacks or has a wrong {error}") from error


def write_ledger(host: Host, ledger: Ledger) -> None:
    """Keep it; on the disk when this returns.

    Raises:
        PrivilegeError, StateError: it cannot be written.
    """
    packages = {name: asdict(ledger.packages[name]) for name in sorted(ledger.packages)}
    _store(
        host,
        HOLDS_FILE,
        {
            "active": ledger.active,
            "packages": packages,
            "lifted": list(ledger.lifted),
            "exempt": list(ledger.exempt),
        },
    )


def read_withheld(host: Host) -> WithheldRecord | None:
    """What the last look at apt's lists found; None: nobody looked yet.

    Raises:
        StateError: it is there and cannot be read, or others than root can write it.
    """
    document = _load(host, WITHHELD_FILE)
    if document is None:
        return None
    try:
        return WithheldRecord(
            looked=str(document["looked"]),
            packages=tuple(
                Withheld(
                    name=str(entry["name"]),
                    installed=str(entry["installed"]),
                    candidate=str(entry["candidate"]),
                    security=bool(entry["security"]),
                    since=entry.get("since"),
                    security_since=entry.get("security_since"),
                )
                for entry in document["packages"]
            ),
            lists_updated=document.get("lists_updated"),
            problem=document.get("problem"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _unreadable(WITHHELD_FILE, f"lacks or has a wrong {error}") from error


def write_withheld(host: Host, record: WithheldRecord) -> None:
    """Keep what was found; raises as ``write_ledger`` does."""
    _store(host, WITHHELD_FILE, asdict(record))


def _load(host: Host, absolute: str) -> dict[str, Any] | None:
    path = host.path(absolute)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(absolute, str(error.strerror)) from error
    if os.geteuid() == 0:
        reason = writable_by_others(Path(f"{host.root}/{absolute}"), root=host.root)
        if reason is not None:
            raise StateError(
                f"{absolute} is not to be trusted: {reason}",
                code="ledger-untrusted",
                hint="see who changed it; then chown root and chmod 0644, or remove it",
            )
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _unreadable(absolute, str(error)) from error
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise _unreadable(absolute, "unknown schema")
    return document


def _store(host: Host, absolute: str, document: dict[str, Any]) -> None:
    content = json.dumps({"schema": _SCHEMA, **document}, indent=1).encode() + b"\n"
    try:
        host.replace_file(absolute, content)
    except PermissionError as error:
        raise PrivilegeError(
            f"{absolute} cannot be written: {error.strerror}", hint="run it as root"
        ) from error
    except OSError as error:
        raise StateError(
            f"{absolute} cannot be written: {error.strerror}",
            code="state-unwritable",
            hint="see that the disk is writable and not full",
        ) from error


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise ValueError(f"package name {text!r}")
    return text


def _unreadable(absolute: str, why: str) -> StateError:
    return StateError(
        f"{absolute} cannot be used: {why}",
        code="ledger-unreadable",
        hint=f"restore it from a backup; or remove it and run gpuguard hold: holds that are "
        f"there then count as not gpuguard's (sudo apt-mark unhold lifts them). File: {absolute}",
    )
