"""What the gate proved since this boot: kept in ``/run``, so that no other boot can use it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from gpuguard.errors import StateError
from gpuguard.host import Host
from gpuguard.host.reading import read_bytes, read_text
from gpuguard.state import GATE_FILE, PROOF_FILE

_SCHEMA = 1
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A verification that was healthy."""

    boot_id: str  # "": a tree without one
    created: str  # RFC 3339, UTC
    verdict: str
    kernel: str | None
    driver: str | None
    build_id: str | None  # of the loaded module
    identity: str  # of the loaded module: patched, stock, none, unknown
    cards: tuple[str, ...]  # UUIDs
    pairs: int  # expected ordered pairs, all of them OK
    source: str  # who says so: nvml+nvidia-smi


def boot_id(host: Host) -> str:
    """This boot's id; "" in a tree that has none."""
    return (read_text(host, _BOOT_ID) or "").strip()


def write_proof(host: Host, proof: Proof) -> None:
    """Keep it for everybody to read.

    Raises:
        StateError: it cannot be written.
    """
    text = json.dumps({"schema": _SCHEMA, **asdict(proof)}, indent=1).encode() + b"\n"
    try:
        host.replace_file(PROOF_FILE, text, mode=0o644)
    except OSError as error:
        raise StateError(
            f"{PROOF_FILE} cannot be written: {error.strerror}", hint="is /run full or read-only?"
        ) from error


def remove_proof(host: Host) -> None:
    """There is no proof any more.

    Raises:
        StateError: it cannot be removed.
    """
    try:
        host.remove_file(PROOF_FILE)
    except OSError as error:
        raise StateError(f"{PROOF_FILE} cannot be removed: {error.strerror}") from error


def read_proof(host: Host) -> Proof | None:
    """The proof of *this* boot; None: there is none, or it is of another one.

    Raises:
        ProbeError: it cannot be read.
        StateError: it is no proof.
    """
    content = read_bytes(host, PROOF_FILE, max_bytes=1 << 20)
    if content is None:
        return None
    try:
        document: dict[str, Any] = json.loads(content)
        known = {name: document[name] for name in Proof.__dataclass_fields__}
        proof = Proof(**{**known, "cards": tuple(map(str, known["cards"]))})
        is_known = document["schema"] == _SCHEMA
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{PROOF_FILE} cannot be used: {error}") from error
    return proof if is_known and proof.boot_id == boot_id(host) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """What the gate said, open or shut; ``message`` is its line."""

    boot_id: str
    created: str  # RFC 3339, UTC
    verdict: str
    message: str


def write_gate_result(host: Host, result: GateResult) -> None:
    """Keep it for those who show it.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({"schema": _SCHEMA, **asdict(result)}, indent=1).encode() + b"\n"
    host.replace_file(GATE_FILE, text, mode=0o644)


def read_gate_result(host: Host) -> GateResult | None:
    """What the gate said since *this* boot; None: it has not run.

    Raises:
        ProbeError: it cannot be read.
        StateError: it is no such file.
    """
    content = read_bytes(host, GATE_FILE, max_bytes=1 << 20)
    if content is None:
        return None
    try:
        document: dict[str, Any] = json.loads(content)
        known = {name: str(document[name]) for name in GateResult.__dataclass_fields__}
        is_known = document["schema"] == _SCHEMA
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{GATE_FILE} cannot be used: {error}") from error
    result = GateResult(**known)
    return result if is_known and result.boot_id == boot_id(host) else None
