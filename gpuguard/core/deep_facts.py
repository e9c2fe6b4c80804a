"""What the deep check saw: bytes sent over every ordered pair of cards. Plain records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Engine(StrEnum):
    """Who moves the bytes, and which way round."""

    COPY_PUSH = "copy-push"  # the source's copy engine writes: cuMemcpyDtoDAsync from its context
    COPY_PULL = "copy-pull"  # the destination's copy engine reads
    COPY_PEER = "copy-peer"  # cuMemcpyPeerAsync: what frameworks call
    KERNEL_STORE = "kernel-store"  # a kernel on the source stores into the destination
    KERNEL_LOAD = "kernel-load"  # a kernel on the destination loads from the source

    @property
    def number(self) -> int:
        """Its place in the pattern's tag."""
        return tuple(Engine).index(self)

    @property
    def is_kernel(self) -> bool:
        """A kernel's loads and stores, not a copy engine."""
        return self in (Engine.KERNEL_STORE, Engine.KERNEL_LOAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where in the buffers one transfer lies, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One active NVLink of a card.

    ``bytes_per_second`` is one direction's line rate; None: NVML does not say.
    """

    remote_bus_id: str | None
    to_switch: bool
    bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepCard:
    """A card and the links at its edge; None: could not be determined.

    ``pcie_*`` is what card and slot can do together, not the state of an idle link.
    """

    index: int
    uuid: str
    pci_bus_id: str
    name: str = ""
    pcie_generation: int | None = None
    pcie_width: int | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    memory_free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One transfer, compared word for word on the destination card.

    ``first`` is the byte offset of the first wrong word in the span, ``expected`` and
    ``found`` the words there. ``sample_equal``: what the host read back of it.
    """

    engine: Engine
    span: int  # index into DeepFacts.spans
    mismatches: int
    first: int | None = None
    expected: int | None = None
    found: int | None = None
    kind: str = ""  # what the wrong word is, see deep_pattern.describe
    sample_equal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Median bandwidth of one engine, one direction."""

    engine: Engine
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepPair:
    """One ordered pair; ``src == dst`` is the self-test on one card.

    ``complete`` is the positive end marker: without it nothing is proven, whatever else is
    here. ``stopped`` names the engine (or step) at which the pair ended early, ``hang`` says
    that it did so by silence, and ``problem`` what CUDA said; ``cannot_tell`` marks problems
    that say nothing about the link (no memory left).
    """

    src: str
    dst: str
    grant: bool | None = None
    nvlink: bool | None = None
    checks: tuple[Check, ...] = ()
    rates: tuple[Rate, ...] = ()
    load_latency_seconds: float | None = None
    copy_latency_seconds: float | None = None
    complete: bool = False
    stopped: str | None = None
    hang: bool = False
    problem: str | None = None
    cannot_tell: bool = False


class CollectiveOutcome(StrEnum):
    """How one all-reduce ended."""

    OK = "ok"
    WRONG_DATA = "wrong-data"
    HANG = "hang"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRun:
    """One all-reduce; ``transport`` is what NCCL says it used (``P2P/direct pointer``)."""

    outcome: CollectiveOutcome
    transport: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFacts:
    """An all-reduce with P2P on and one with P2P off; ``problem``: why there is none."""

    with_p2p: CollectiveRun | None = None
    without_p2p: CollectiveRun | None = None
    version: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A process that computes on a card."""

    pid: int
    name: str
    source: str  # "nvml", "/dev/nvidia-uvm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why nothing could be looked at; ``code`` is stable."""

    code: str
    remedy: str
    text: str = ""
    evidence: tuple[tuple[str, str], ...] = ()


_LOOK_AT_DRIVER = "does nvidia-smi answer? see dmesg for NVRM and Xid lines"
NOT_INSTALLED = Problem(
    code="deep-not-installed",
    remedy="pip install 'gpuguard[deep]'; with a driver before 580: 'gpuguard[deep-cu12]'",
)
UNAVAILABLE = Problem(code="deep-unavailable", remedy=_LOOK_AT_DRIVER)
HANG_AT_START = Problem(code="deep-hang-at-start", remedy=_LOOK_AT_DRIVER)
REFUSED = Problem(
    code="deep-refused",
    remedy="stop them first; or accept that both are slower: --beside-workloads",
)
OUTSTANDING = Problem(
    code="probe-outstanding", remedy="it holds the cards until it ends; that may take a reboot"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepFacts:
    """Everything the judgement needs; ``problem``: why nothing could be looked at."""

    cards: tuple[DeepCard, ...] = ()
    spans: tuple[Span, ...] = ()
    pairs: tuple[DeepPair, ...] = ()
    self_tests: tuple[DeepPair, ...] = ()
    expected: tuple[tuple[str, str], ...] | None = None  # pairs that must work; None: all
    collective: CollectiveFacts | None = None
    workloads: tuple[Workload, ...] = ()
    virtualised: str | None = None
    problem: Problem | None = None

    def expects(self, pair: DeepPair) -> bool:
        """Must this pair work: between groups of cards of several generations none need."""
        return self.expected is None or (pair.src, pair.dst) in self.expected
