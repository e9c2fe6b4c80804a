"""What the doctor's probes found out: plain records, no I/O, no decisions.

A field of type ``T | None | Unread`` tells three things apart: a value, "is not there", and
"could not look, for this reason". The last is never to be read as either of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuguard.core.facts import HostFacts


@dataclass(frozen=True, slots=True)
class Unread:
    """A place that could not be looked at, and why."""

    place: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A PCIe link; speeds in GT/s. None: not stated (sysfs says "Unknown", or nothing)."""

    speed: float | None = None
    width: int | None = None
    max_speed: float | None = None
    max_width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """A port or bridge above a card; ``acs`` is its ACS Control register, None if it has none."""

    address: str
    acs: int | Unread | None
    link: Link = field(default_factory=Link)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlCard:
    """What NVML adds to a card. None: it would not say."""

    bus_id: str
    uuid: str = ""
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    display_active: bool | None = None
    utilization_percent: int | None = None
    nvlink_peers: tuple[str, ...] = ()  # bus ids of the cards that it reaches by NVLink
    processes: tuple[int, ...] = ()
    process_bytes: tuple[tuple[int, int], ...] = ()  # memory of those that NVML tells it of


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """One NVIDIA display device on the PCI bus.

    ``root`` is the host bridge it hangs below (``pci0000:40``), ``bridges`` are the ports
    between, the host's first. ``iommu_type`` None: in no group. ``bar1_bytes`` 0: it has no
    address. ``bar1_possible`` is the largest size that the card offers for it. ``firmware``
    is the GSP firmware's version.
    """

    bus_id: str
    driver: str | Unread | None = None
    root: str = ""
    bridges: tuple[Bridge, ...] = ()
    numa_node: int | None = None
    iommu_group: str | None = None
    iommu_type: str | Unread | None = None
    bar1_bytes: int | Unread | None = None
    bar1_possible: int | None = None
    boot_vga: bool | None = None
    connected: tuple[str, ...] = ()  # connectors with a screen: card1-HDMI-A-1
    link: Link = field(default_factory=Link)
    minor: int | None = None
    firmware: str | None = None
    excluded_by_driver: bool = False
    nvml: NvmlCard | None = None


@dataclass(frozen=True, slots=True)
class ModuleOption:
    """One configured option of the nvidia module; ``name`` without ``NVreg_``."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtFacts:
    """Virtual machine, container: what says so. ``hypervisor`` None: not told by the CPU."""

    vendor: str | None = None
    product: str | None = None
    hypervisor: bool | None = None
    container: str | None = None
    cpu_vendor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFault:
    """What the kernel said about one card, deduplicated; ``time`` as the log has it.

    ``kind``: "fallen-off", "xid", "page-fault", "bound", "init-failed". ``card`` is empty for
    a line that names none.
    """

    kind: str
    card: str
    text: str
    time: str
    count: int = 1
    xid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """The kernel's log of this boot; ``source`` None: it could not be read, see ``problem``."""

    source: str | None = None
    faults: tuple[LogFault, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of an environment variable, and the file that sets it."""

    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingUnit:
    """A service that computes on the cards, with the variables that matter for P2P.

    ``unread`` names files that would add to its environment and could not be read.
    ``cache_dirs`` are folders inside the host where its vLLM may keep caches.
    """

    name: str
    path: str
    user: str = "root"
    environment: tuple[tuple[str, Setting], ...] = ()
    unread: tuple[Unread, ...] = ()
    cache_dirs: tuple[str, ...] = ()

    def setting(self, name: str) -> Setting | None:
        """The value that the service would see, if any."""
        return dict(self.environment).get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCache:
    """A ``gpu_p2p_access_cache_for_*.json``; ``cards`` None: not what vLLM would write."""

    path: str
    modified: float  # seconds since the epoch
    cards: int | None = None
    refused: int = 0  # pairs that it calls inaccessible


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """Everything that the checks decide on. ``booted`` is the boot time since the epoch."""

    host: HostFacts | Unread
    cards: tuple[CardFacts, ...] | Unread
    has_module_trees: bool = True
    nvml_problem: str | None = None
    excluded: frozenset[str] = frozenset()  # bus ids that the configuration leaves out
    params: tuple[tuple[str, str], ...] | Unread | None = None
    options: tuple[ModuleOption, ...] | Unread = ()
    loaded_modules: tuple[str, ...] | Unread = ()  # canonical names
    missing_nodes: tuple[str, ...] | Unread = ()
    virt: VirtFacts = field(default_factory=VirtFacts)
    log: LogFacts = field(default_factory=LogFacts)
    lockdown: str | Unread | None = None
    units: tuple[ServingUnit, ...] | Unread = ()
    caches: tuple[VllmCache, ...] = ()
    unread_caches: tuple[Unread, ...] = ()
    booted: float | None = None
    built: float | None = None  # when the loaded build of ours was made

    def own_cards(self) -> tuple[CardFacts, ...]:
        """The cards that P2P is expected of: all but those that the configuration excludes."""
        if isinstance(self.cards, Unread):
            return ()
        return tuple(card for card in self.cards if not self.is_excluded(card))

    def is_excluded(self, card: CardFacts) -> bool:
        """True if the configuration leaves this card out."""
        return card.bus_id in self.excluded
