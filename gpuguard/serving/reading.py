"""What vLLM says in its log and its metrics. No I/O; texts of 0.32.0 and 0.33.0."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

#: After one of these the engine does not come up any more.
FATAL = (
    "To serve at least one request with the model's max seq len",
    "No available memory for the cache blocks",
    "Timed out waiting for engine core processes to start",
    "is less than desired GPU memory utilization",
    "Engine core initialization failed",
    "Failed to infer device type",
    "requires a BF16 or FP8-e4m3 main KV cache",
)
_NCCL = "vLLM is using nccl=="
_POOL = re.compile(r"(?:GPU|CPU) KV cache size: ([\d,]+) tokens")
_INFO = re.compile(r'^vllm:cache_config_info\{.*?\bkv_cache_size_tokens="(\d+)"', re.MULTILINE)
_BLOCK = re.compile(r"Setting attention block size to (\d+) tokens")
_SAMPLE = re.compile(r"^(vllm:[a-z_]+)(?:\{[^\n]*\})? ([-+.\deE]+|NaN|[+-]Inf)$", re.MULTILINE)
#: NCCL_DEBUG=INFO: ``NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM`` (2.18 to 2.28).
_TRANSPORT = re.compile(r"\bNCCL INFO Channel .* -> .* via (P2P|SHM|NET)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an engine has to do; None: it does not say."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits, as far as it says."""
        return self.running == 0 and self.waiting == 0


def fatal_line(lines: Iterable[str]) -> str | None:
    """The first line that ends every hope."""
    return next((line.strip() for line in lines if any(text in line for text in FATAL)), None)


def hangs_in_nccl(lines: Iterable[str]) -> bool:
    """The last thing it said is which NCCL it uses: collectives are being set up."""
    said = [line for line in lines if line.strip()]
    return bool(said) and _NCCL in said[-1]


def pool_tokens(metrics: str, lines: Iterable[str]) -> int | None:
    """KV tokens of the pool, from the metrics, else from the log."""
    if match := _INFO.search(metrics):
        return int(match[1])
    found = [match[1] for line in lines if (match := _POOL.search(line))]
    return int(found[-1].replace(",", "")) if found else None


def block_size(lines: Iterable[str]) -> int | None:
    """The block size that was set over the user's; None: it was not raised."""
    found = [match[1] for line in lines if (match := _BLOCK.search(line))]
    return int(found[-1]) if found else None


def transports(lines: Iterable[str]) -> frozenset[str]:
    """``P2P``, ``SHM``, ``NET``: how NCCL connects the cards (with NCCL_DEBUG=INFO only)."""
    return frozenset(match[1] for line in lines for match in _TRANSPORT.finditer(line))


def parse_load(metrics: str) -> Load:
    """Requests and use of the pool, summed over engines."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        sums[name] = sums.get(name, 0.0) + float(value)
    return Load(
        running=sums.get("vllm:num_requests_running"),
        waiting=sums.get("vllm:num_requests_waiting"),
        kv_usage=sums.get("vllm:kv_cache_usage_perc"),
    )
