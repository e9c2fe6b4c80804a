"""The last ``verify --deep`` as series; from the document that it left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from gpuguard.core.deep import DeepVerdict
from gpuguard.core.metrics import Sample, sample, stateset

_ENGINES = {
    "copy-push": ("write", "ce"),
    "copy-pull": ("read", "ce"),
    "kernel-store": ("write", "sm"),
    "kernel-load": ("read", "sm"),
}
#: Verdicts that say what the bytes were: equal, also where they came too fast, or not.
_COMPARED = {"ok": True, "implausible": True, "wrong-data": False}
TRANSFER_VERDICTS = tuple(verdict.value.replace("-", "_") for verdict in DeepVerdict)
COLLECTIVE_VERDICTS = ("healthy", "hang", "wrong_data", "transfer_error", "inconclusive")


def transfer_samples(
    deep: Mapping[str, Any], accepted: Mapping[tuple[str, str, str], float]
) -> Iterator[Sample]:
    """Bytes and speed of every pair that was tried.

    Args:
        deep: the document of core.deep_document.
        accepted: bytes per second that were good once, by source, destination and engine.
    """
    seen = Counter(
        str(engine["verdict"]).replace("-", "_")
        for pair in deep["pairs"]
        for engine in pair["engines"]
    )
    for verdict in TRANSFER_VERDICTS:
        yield sample("gpuguard_p2p_transfers", seen[verdict], verdict)
    for pair in deep["pairs"]:
        src, dst = str(pair["src"]), str(pair["dst"])
        rates = {}
        for engine in pair["engines"]:
            name, rate = engine["engine"], engine["bytes_per_second"]
            if rate is not None:
                rates[name] = float(rate)
            if name in _ENGINES and engine["verdict"] in _COMPARED:
                equal = _COMPARED[engine["verdict"]]
                yield sample("gpuguard_p2p_transfer_ok", equal, src, dst, *_ENGINES[name])
        if rates:
            fastest = max(rates, key=lambda name: rates[name])
            yield sample("gpuguard_p2p_bandwidth_bytes_per_second", rates[fastest], src, dst)
            known = accepted.get((src, dst, fastest))
            if known is not None:
                name = "gpuguard_p2p_bandwidth_accepted_bytes_per_second"
                yield sample(name, known, src, dst)
        if (limit := pair["ceiling_bytes_per_second"]) is not None:
            yield sample("gpuguard_p2p_bandwidth_limit_bytes_per_second", limit, src, dst)
        if (latency := pair["load_latency_seconds"]) is not None:
            yield sample("gpuguard_p2p_latency_seconds", latency, src, dst)


def collective_samples(collective: Mapping[str, Any] | None) -> tuple[Sample, ...]:
    """The all-reduce; nothing where none was tried."""
    if collective is None:
        return ()
    word = str(collective["verdict"] or "inconclusive").replace("-", "_")
    current = word if word in COLLECTIVE_VERDICTS else "inconclusive"
    return stateset("gpuguard_p2p_collective_verdict", COLLECTIVE_VERDICTS, current)
