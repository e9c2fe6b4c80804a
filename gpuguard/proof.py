"""What was proven since this boot: kept in ``/run``, so that no other boot can use it.

Two tiers: what the driver *grants*, as the gate saw it, and what *bytes* have shown
(``verify --deep``). Root acts upon both, so it believes only files that root alone can write.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from gpuguard.errors import StateError
from gpuguard.host import Host
from gpuguard.host.files import writable_by_others
from gpuguard.host.reading import read_bytes, read_text
from gpuguard.state import DEEP_PROOF_FILE, GATE_FILE, PROOF_FILE

_SCHEMA = 1
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A verification that was healthy.

    ``visible``: cards that the driver shows, also those that do not count. ``together``: so many of
    them, from the first on the PCI bus on, were granted P2P with each other. None: of a gpuguard
    that did not write it down.
    """

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
    visible: int | None = None
    together: int | None = None


def boot_id(host: Host) -> str:
    """This boot's id; "" in a tree that has none."""
    return (read_text(host, _BOOT_ID) or "").strip()


def write_proof(host: Host, proof: Proof) -> None:
    """Keep it for everybody to read.

    Raises:
        StateError: it cannot be written.
    """
    _write(host, PROOF_FILE, asdict(proof))


def remove_proof(host: Host) -> None:
    """There is no proof any more.

    Raises:
        StateError: it cannot be removed.
    """
    _remove(host, PROOF_FILE)


def read_proof(host: Host) -> Proof | None:
    """The proof of *this* boot; None: there is none, or it is of another one.

    Raises:
        ProbeError: it cannot be read.
        StateError: it is no proof, or others than root could have written it.
    """
    known = _read(host, PROOF_FILE, Proof)
    return None if known is None else Proof(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepProof:
    """What ``verify --deep`` found since this boot, good or bad.

    ``pairs``: ordered pairs over which every byte was right. ``problem``: why it proves nothing;
    None: it does. ``is_fault``: something was seen to be wrong, which is more than not seen to be
    right.
    """

    boot_id: str
    created: str  # RFC 3339, UTC
    kernel: str | None
    driver: str | None
    build_id: str | None  # of the loaded module
    cards: tuple[str, ...]  # UUIDs
    pairs: int
    all_reduce: bool  # its sums were right, and NCCL took P2P for it
    problem: str | None
    is_fault: bool


def write_deep_proof(host: Host, proof: DeepProof) -> None:
    """Keep it for everybody to read.

    Raises:
        StateError: it cannot be written.
    """
    _write(host, DEEP_PROOF_FILE, asdict(proof))


def remove_deep_proof(host: Host) -> None:
    """Nothing is known of bytes any more.

    Raises:
        StateError: it cannot be removed.
    """
    _remove(host, DEEP_PROOF_FILE)


def read_deep_proof(host: Host) -> DeepProof | None:
    """What bytes have shown since *this* boot; None: nobody has moved any.

    Raises:
        ProbeError: it cannot be read.
        StateError: it is no such record, or others than root could have written it.
    """
    known = _read(host, DEEP_PROOF_FILE, DeepProof)
    return None if known is None else DeepProof(**known)


def _write(host: Host, file: str, values: dict[str, Any]) -> None:
    text = json.dumps({"schema": _SCHEMA, **values}, indent=1).encode() + b"\n"
    try:
        host.replace_file(file, text, mode=0o644)
    except OSError as error:
        raise StateError(
            f"{file} cannot be written: {error.strerror}", hint="is /run full or read-only?"
        ) from error


def _remove(host: Host, file: str) -> None:
    try:
        host.remove_file(file)
    except OSError as error:
        raise StateError(f"{file} cannot be removed: {error.strerror}") from error


def _read(host: Host, file: str, kind: type[Proof | DeepProof]) -> dict[str, Any] | None:
    content = read_bytes(host, file, max_bytes=1 << 20)
    if content is None:
        return None
    _refuse_untrusted(host, file)
    try:
        document: dict[str, Any] = json.loads(content)
        known = {
            field.name: document[field.name]
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING or field.name in document
        }
        known["cards"] = tuple(map(str, known["cards"]))
        is_known = document["schema"] == _SCHEMA
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{file} cannot be used: {error}") from error
    return known if is_known and known["boot_id"] == boot_id(host) else None


def _refuse_untrusted(host: Host, file: str) -> None:
    if os.geteuid() != 0:
        return
    try:
        reason = writable_by_others(host.root / file.lstrip("/"), root=host.root)
    except OSError as error:
        reason = f"it cannot be looked at: {error.strerror}"
    if reason is not None:
        raise StateError(
            f"{file} is not believed: {reason}",
            hint=f"find out who wrote it; then rm {file} and prove it anew: "
            "systemctl restart gpuguard-verify.service, gpuguard verify --deep",
        )


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
