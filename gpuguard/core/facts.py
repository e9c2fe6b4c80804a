"""What probes found out about a host. Plain records, no I/O, no decisions.

Paths are absolute paths inside the host. ``None`` always means "could not be
determined" or "is not there", as each field says; it never means "fine".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gpuguard.core.automation import AutomationFacts
from gpuguard.core.holds import HoldFacts
from gpuguard.core.window import WindowFacts

#: Canonical names, as loaded. What the files are called differs (``nvidia-current-open-drm.ko``).
MODULE_NAMES = ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem")


class Identity(StrEnum):
    """Whose module a file is, by GNU build-id against our build records."""

    PATCHED = "patched"
    STOCK = "stock"
    MISSING = "missing"


class HeadersState(StrEnum):
    """Can external modules be compiled for a kernel."""

    PRESENT = "present"
    MISSING = "missing"
    INCOMPLETE = "incomplete"


class InitramfsState(StrEnum):
    """Does the initramfs carry the NVIDIA modules that resolve now."""

    NONE = "none"  # no image, or an image without NVIDIA modules: nothing to go stale
    CURRENT = "current"
    STALE = "stale"
    UNKNOWN = "unknown"


class SecureBootState(StrEnum):
    """What the firmware will do with module signatures."""

    NOT_APPLICABLE = "not-applicable"  # booted without EFI
    OFF = "off"
    ON = "on"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFile:
    """One kernel module file.

    ``build_id`` is lower-case hex (40 digits for SHA-1) and, like ``vermagic``, ``version``
    and ``srcversion``, None where the file has none or cannot be read; ``problem`` says why.
    """

    path: str
    base_name: str  # file name without .ko and compression suffix: nvidia-current-open-drm
    build_id: str | None = None
    vermagic: str | None = None
    version: str | None = None
    srcversion: str | None = None
    signed: bool = False
    signer: str | None = None  # as in ``host.signature``; None: not signed, or that is garbage
    problem: str | None = None
    packaged: bool = False  # dpkg put it there; asked only for files that look stray


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModule:
    """What modprobe would load under one canonical name, and who competes for it."""

    name: str
    file: ModuleFile | None
    identity: Identity
    others: tuple[ModuleFile, ...] = ()
    blocked: str | None = None  # the setting because of which modprobe loads none of them


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadersFacts:
    """What ``/lib/modules/R/build`` leads to.

    ``build_dir`` is the output tree (``.config``, ``Module.symvers``), ``source_dir`` the
    source tree where it is apart (Debian's ``-common``), else equal to ``build_dir``.
    ``fingerprint`` is a SHA-256 over Module.symvers and .config. ``compiler`` is
    CONFIG_CC_VERSION_TEXT. ``missing`` names what an incomplete tree lacks.
    """

    state: HeadersState
    build_dir: str | None = None
    source_dir: str | None = None
    missing: tuple[str, ...] = ()
    fingerprint: str | None = None
    package: str | None = None  # what to install: linux-headers-6.1.0-50-amd64
    package_version: str | None = None
    compiler: str | None = None
    architecture: str | None = None  # x86_64, arm64, ...; None: not stated
    release: str | None = None  # what the tree says it is for (utsrelease.h)
    module_signing: bool = False  # CONFIG_MODULE_SIG
    signature_hash: str = "sha256"  # CONFIG_MODULE_SIG_HASH


@dataclass(frozen=True, slots=True, kw_only=True)
class InitramfsFacts:
    """The initial RAM disk of one kernel; ``modules`` maps base name to build-id inside it.

    ``path`` is a file of its own that can be made anew; what lies inside a unified kernel image
    has none, and ``unified`` names that image.
    """

    state: InitramfsState
    path: str | None = None
    unified: str | None = None
    modules: tuple[tuple[str, str | None], ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecord:
    """One finished build: what went in, what came out.

    ``build_ids`` maps canonical module name to build-id. ``inputs`` holds the keys that
    decide whether a rebuild is due: source, patches, compiler, headers (see build.inputs).
    """

    release: str
    driver_version: str
    build_ids: tuple[tuple[str, str], ...]
    inputs: tuple[tuple[str, str], ...] = ()
    created: str = ""  # RFC 3339, UTC
    duration_seconds: float = 0.0
    core_cached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFailure:
    """A build that failed, remembered by its inputs so that it is not tried in a loop."""

    release: str
    inputs: tuple[tuple[str, str], ...]
    code: str
    message: str
    created: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """One kernel release with a module tree.

    ``image`` is the kernel image's path, None for a leftover or half-removed tree.
    ``suffix`` is how this kernel's own modules are compressed: "", ".xz", ".zst", ".gz".
    ``records`` are our builds for this release, newest last. ``enforced`` says what makes this
    kernel reject unsigned modules without Secure Boot. ``command_line`` is what the boot loader
    gives it; None: it does not boot next, or that could not be told.
    """

    release: str
    image: str | None
    modules: tuple[ResolvedModule, ...]
    headers: HeadersFacts
    initramfs: InitramfsFacts
    suffix: str = ""
    records: tuple[BuildRecord, ...] = ()
    failure: BuildFailure | None = None
    problem: str | None = None  # why its modules could not be resolved
    enforced: str | None = None
    command_line: str | None = None
    left_alone: str | None = None  # when the operator rolled it back: not for automatic runs
    unconfigured: str | None = None  # dpkg's word for a package of it that is half installed
    has_own_modules: bool = True  # ``kernel/`` is there: the package is not purged


@dataclass(frozen=True, slots=True, kw_only=True)
class NextKernel:
    """What the boot loader will start; ``release`` None: it could not be told, see reason.

    ``initrds`` are the files that it loads beside the kernel (a unified kernel image: itself),
    by path in the host, or as the loader writes it where no such file is found. None, as
    ``command_line``: the source does not say.
    """

    release: str | None
    source: str  # "grub", "systemd-boot", "extlinux", "/vmlinuz", "none"
    reason: str = ""
    initrds: tuple[str, ...] | None = None
    command_line: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BootPin:
    """Our own setting of the boot default, in the file at ``path``."""

    release: str
    loader: str  # "grub", "systemd-boot"
    path: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """NVIDIA driver versions side by side; every version is the full one (535.261.03)."""

    userland: str | None = None
    userland_source: str = ""  # the file or package that says so
    loaded: str | None = None
    loaded_build_id: str | None = None
    flavour: str | None = None  # "open", "proprietary"
    problem: str | None = None  # why the versions could not be looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureBootFacts:
    """State of Secure Boot and of the key that modules are signed with.

    ``enrolled`` None: the list of enrolled keys cannot be read. ``signers`` is what signatures by
    this key call its certificate; ``trusted`` likewise all of the firmware's and shim's lists.
    """

    state: SecureBootState
    key: str | None = None
    certificate: str | None = None
    enrolled: bool | None = None
    signers: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DkmsEntry:
    """One line of ``dkms status``; ``release`` and ``architecture`` None for ``added``/``broken``.

    ``state`` is the word after the last ``: ``; ``remark`` what follows it in brackets.
    """

    module: str
    version: str
    release: str | None
    architecture: str | None
    state: str
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A card as the driver reports it; ``index`` is for display only and changes."""

    index: int
    uuid: str
    pci_bus_id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pPair:
    """Status of one ordered pair; OK, CNS, GNS, TNS, DR, NS, U, or the token verbatim."""

    src: str  # UUID
    dst: str
    read: str
    write: str


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pFacts:
    """What the driver grants; n cards have n * (n - 1) ordered pairs.

    ``source`` None: nothing answered; ``problem`` says why in words, ``reason`` as a code of
    ``core.p2p_reasons``. ``lost`` are cards that the driver knows and cannot reach, by PCI bus
    id where it says so, and what it said.
    """

    source: str | None = None  # "nvml", "nvidia-smi"
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[P2pPair, ...] = ()
    problem: str | None = None
    reason: str | None = None
    lost: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Everything the decisions need; ``kernels`` are sorted, oldest first."""

    kernels: tuple[KernelFacts, ...]
    running: str | None
    next: NextKernel
    driver: DriverFacts = field(default_factory=DriverFacts)
    secure_boot: SecureBootFacts = field(
        default_factory=lambda: SecureBootFacts(state=SecureBootState.UNKNOWN)
    )
    dkms: tuple[DkmsEntry, ...] = ()
    p2p: P2pFacts = field(default_factory=P2pFacts)
    pci_gpus: tuple[str, ...] = ()  # PCI bus ids of NVIDIA display devices
    holds: HoldFacts = field(default_factory=HoldFacts)
    automation: AutomationFacts | None = None  # None: nothing was set up
    boot_pin: BootPin | None = None
    window: WindowFacts | None = None
    modules_config: str = ""  # fingerprint of depmod.d and modprobe.d: decides who wins
    interrupted: str | None = None  # a change that was killed and not yet cleaned up after
    blacklisted: tuple[tuple[str, str], ...] = ()  # (module, file): not loaded by itself

    def running_records(self) -> tuple[BuildRecord, ...] | None:
        """Our builds for the running kernel; None: which one runs is not known."""
        if self.running is None:
            return None
        return tuple(r for k in self.kernels if k.release == self.running for r in k.records)
