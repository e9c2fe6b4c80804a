"""Bandwidths that an operator accepted as good: ``p2p-baseline.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable

from gpuguard.core.deep import Baseline
from gpuguard.core.deep_facts import DeepPair, Engine
from gpuguard.errors import StateError
from gpuguard.host.port import Host
from gpuguard.host.reading import read_text
from gpuguard.state import STATE_DIR

BASELINE_FILE = f"{STATE_DIR}/p2p-baseline.json"
_SCHEMA = 1


def read_baseline(host: Host) -> tuple[Baseline, int | None]:
    """What was accepted, and for transfers of how many bytes; nothing and None if nothing was.

    Raises:
        StateError: the file is there and cannot be used.
    """
    text = read_text(host, BASELINE_FILE)
    if text is None:
        return {}, None
    try:
        document = json.loads(text)
        known = {_SCHEMA: document["pairs"]}
        rates = {
            (pair["src"], pair["dst"], Engine(engine)): float(rate)
            for pair in known[document["schema"]]
            for engine, rate in pair["bytes_per_second"].items()
        }
        return rates, int(document["length"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"{BASELINE_FILE} cannot be used: {error}",
            hint="move it away, and record a new one: gpuguard verify --deep --accept",
        ) from error


def write_baseline(host: Host, pairs: Iterable[DeepPair], *, length: int, accepted: str) -> None:
    """Replace it; ``length`` is that of the measured transfer, ``accepted`` when, RFC 3339."""
    document = {
        "schema": _SCHEMA,
        "accepted": accepted,
        "length": length,
        "pairs": [
            {
                "src": pair.src,
                "dst": pair.dst,
                "bytes_per_second": {rate.engine: rate.bytes_per_second for rate in pair.rates},
            }
            for pair in pairs
        ],
    }
    host.replace_file(BASELINE_FILE, json.dumps(document, indent=1).encode() + b"\n")
