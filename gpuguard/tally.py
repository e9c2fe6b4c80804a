"""How many builds ended how: a counter that outlives processes, and when the last ones were."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict

from gpuguard.core.tally import RESULTS, Tally
from gpuguard.errors import BuildError, PatchRejectedError, ProbeError, StateError, VerifyError
from gpuguard.host import Host
from gpuguard.host.reading import read_bytes
from gpuguard.state import TALLY_FILE

_SCHEMA = 1
_MAX_BYTES = 1 << 16


def read_tally(host: Host) -> Mapping[str, Tally]:
    """Every result, whether there was one or not.

    Raises:
        ProbeError: it cannot be read.
        StateError: it is no tally.
    """
    content = read_bytes(host, TALLY_FILE, max_bytes=_MAX_BYTES)
    if content is None:
        return {result: Tally() for result in RESULTS}
    try:
        document = json.loads(content)
        known = {_SCHEMA: document}[document["schema"]]
        return {result: _tally(known["results"][result]) for result in RESULTS}
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{TALLY_FILE} cannot be used: {error}", hint="remove it: it is only counted anew"
        ) from error


def _tally(entry: Mapping[str, float]) -> Tally:
    return Tally(int(entry["count"]), float(entry["last"]), float(entry["seconds"]))


@contextmanager
def tallied(host: Host) -> Iterator[None]:
    """Count the build inside, however it ends; what keeps it from being begun is no build.

    Counting must not make a build fail: what cannot be written is not counted, and what cannot
    be read begins anew.
    """
    began = time.monotonic()
    try:
        yield
    except (BuildError, PatchRejectedError, VerifyError):
        _count(host, "failed", time.monotonic() - began)
        raise
    _count(host, "done", time.monotonic() - began)


def _count(host: Host, result: str, seconds: float) -> None:
    try:
        known = dict(read_tally(host))
    except (ProbeError, StateError):
        known = {name: Tally() for name in RESULTS}
    now = round(time.time(), 3)
    known[result] = Tally(known[result].count + 1, now, round(seconds, 3))
    results = {name: asdict(tally) for name, tally in known.items()}
    with suppress(OSError):
        text = json.dumps({"schema": _SCHEMA, "results": results}, indent=1).encode()
        host.replace_file(TALLY_FILE, text + b"\n")
