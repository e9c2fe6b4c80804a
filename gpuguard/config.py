"""The configuration's records: one YAML file plus drop-ins; ``config_file`` loads them.

Every field is documented in gpuguard.yaml(5) and by ``gpuguard config init``.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field

from gpuguard.core.expectation import is_bus_id, is_card, normal_card
from gpuguard.core.facts import MODULE_NAMES
from gpuguard.core.package_names import HELD_PACKAGES, NEVER_HELD_PACKAGES

_STRICT = ConfigDict(extra="forbid")
_PLACEHOLDERS = ("driver_version",)


def _absolute(path: str) -> str:
    # A relative path would depend on where the daemon, the hook or a person stands.
    if not path.startswith("/"):
        raise ValueError("must be an absolute path")
    return path


def _template(text: str) -> str:
    if unknown := [name for name in _placeholders(text) if name not in _PLACEHOLDERS]:
        raise ValueError(
            f"unknown placeholder {{{unknown[0]}}}; {{driver_version}} is the only one"
        )
    return text


def _placeholders(text: str) -> list[str]:
    try:
        return [name for _, name, *_ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"a brace without its partner ({error})") from error


def _not_root(user: str) -> str:
    if user in ("root", "0"):
        raise ValueError("must not be root: compilers run on files that others wrote")
    return user


def _known_modules(names: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := [name for name in names if name not in MODULE_NAMES]:
        raise ValueError(f"unknown module {unknown[0]}; known are {', '.join(MODULE_NAMES)}")
    return names


def _card(name: str) -> str:
    if not is_card(name):
        raise ValueError("must be a UUID (GPU-...) or a PCI bus id (0000:01:00.0)")
    return normal_card(name)


def _bus_id(name: str) -> str:
    if not is_bus_id(name):
        raise ValueError("must be a PCI bus id (0000:01:00.0)")
    return normal_card(name)


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Card = Annotated[str, AfterValidator(_card)]
BusId = Annotated[str, AfterValidator(_bus_id)]
Template = Annotated[str, Field(min_length=1), AfterValidator(_template)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """Where the operator's NVIDIA open module source is.

    ``path`` is a git clone or a plain folder. ``ref`` and ``stock_ref`` are templates with
    ``{driver_version}`` and apply to a clone only; ``stock_ref`` names the unpatched state,
    so that a "patched" ref that changes nothing is noticed. ``trusted_owner`` is an account
    other than root whose files the operator trusts root to compile. ``already_patched`` is the
    operator's word for a source without patches and without a stock state to compare with.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    path: AbsolutePath
    ref: Template | None = None
    stock_ref: Template | None = None
    # Applied in this order; absolute paths, globs and {driver_version} allowed.
    patches: tuple[Annotated[Template, AfterValidator(_absolute)], ...] = ()
    trusted_owner: str | None = None
    already_patched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """How modules are compiled."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    user: Annotated[str, Field(min_length=1), AfterValidator(_not_root)] = "gpuguard-build"
    jobs: Annotated[int, Field(ge=0, le=1024)] = 0  # 0: one per CPU
    timeout_seconds: Annotated[float, Field(gt=0)] = 3600.0
    modules: Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_known_modules)] = (
        MODULE_NAMES
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningConfig:
    """Module signing; ``auto`` signs when the kernel wants it and a key is there, as DKMS does."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    mode: Literal["auto", "always", "never"] = "auto"
    # None: what DKMS's framework.conf names, then Debian's and Ubuntu's places.
    key: AbsolutePath | None = None
    certificate: AbsolutePath | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupConfig:
    """How many backups of a kernel to keep; the last good one of a kernel in use always stays."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    keep: Annotated[int, Field(ge=1, le=1000)] = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """Which installed kernels gpuguard looks after; shell patterns on the release."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class P2pConfig:
    """Which cards must be there and transfer directly, by UUID or PCI bus id.

    All left out: what was accepted, else the PCI bus. ``groups``: P2P is expected within each
    of them only. ``exclude``: cards that are meant for something else (vfio-pci).
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    expected_gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    gpus: tuple[Card, ...] = ()
    groups: tuple[Annotated[tuple[Card, ...], Field(min_length=2)], ...] = ()
    exclude: tuple[BusId, ...] = ()
    # Share of the accepted bandwidth below which verify --deep warns.
    regressed_below: Annotated[float, Field(gt=0, le=1)] = 0.8

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        grouped = [card for group in self.groups for card in group]
        for cards in (self.gpus, grouped):
            if twice := [card for card in cards if cards.count(card) > 1]:
                raise ValueError(f"{twice[0]} is named twice")
        if self.gpus and self.expected_gpus not in (None, len(self.gpus)):
            raise ValueError(f"expected_gpus is {self.expected_gpus}, gpus has {len(self.gpus)}")
        if both := set(self.exclude) & {*self.gpus, *grouped}:
            raise ValueError(f"{min(both)} is expected and excluded")


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsConfig:
    """Which packages change in a maintenance window only; shell patterns on installed names."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    packages: tuple[str, ...] = HELD_PACKAGES
    exclude: tuple[str, ...] = NEVER_HELD_PACKAGES
    enforce: bool = True  # automatic runs hold again what lost its hold; else only reported


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomaticConfig:
    """What runs that nobody started may do: those of the timer, the path unit and the hooks."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    rebuild: bool = True
    # apt may work for long; a run that gave up comes again, at once.
    lock_timeout_seconds: Annotated[float, Field(ge=5)] = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootConfig:
    """What holds a reboot back, and which kernel it starts.

    ``inhibit``: a shutdown inhibitor is held while a rebuild runs, or also while the next kernel
    is not ready, then for at most ``inhibit_seconds``. ``keep_last_good``: when the boot default
    is set to the last kernel that is ready.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    inhibit: Literal["never", "rebuild", "unready"] = "unready"
    inhibit_seconds: Annotated[float, Field(gt=0)] = 3600.0
    keep_last_good: Literal["never", "window", "always"] = "window"


@dataclass(frozen=True, slots=True, kw_only=True)
class AptConfig:
    """What happens before apt installs a kernel or driver that has no patched source."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    check: Literal["never", "warn", "refuse"] = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeConfig:
    """The maintenance window; ``packages``: installed ones it upgrades besides those held."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """The gate after boot; ``wait_seconds``: for the device nodes of the expected cards."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    wait_seconds: Annotated[float, Field(ge=0, le=600)] = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The daemon. ``web_config_file``: TLS and basic authentication, as exporters have it."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    listen: Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:]+\]|[^:\[\]]+):\d{1,5}$")] = (
        "127.0.0.1:9838"
    )
    interval_seconds: Annotated[float, Field(ge=1, le=86400)] = 60.0
    web_config_file: AbsolutePath | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesConfig:
    """The front before the lanes; lanes themselves are files of their own."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    listen: Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:]+\]|[^:\[\]\s]+):\d{1,5}$")] = (
        "127.0.0.1:8000"
    )
    retry_after_seconds: Annotated[int, Field(ge=1, le=3600)] = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration.

    ``driver_version`` None: what the installed userland says.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    source: SourceConfig
    driver_version: Annotated[str, Field(pattern=r"^\d+\.\d+(\.\d+)?$")] | None = None
    build: BuildConfig = field(default_factory=BuildConfig)
    signing: SigningConfig = field(default_factory=SigningConfig)
    backups: BackupConfig = field(default_factory=BackupConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    p2p: P2pConfig = field(default_factory=P2pConfig)
    holds: HoldsConfig = field(default_factory=HoldsConfig)
    automatic: AutomaticConfig = field(default_factory=AutomaticConfig)
    reboot: RebootConfig = field(default_factory=RebootConfig)
    apt: AptConfig = field(default_factory=AptConfig)
    upgrade: UpgradeConfig = field(default_factory=UpgradeConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    lanes: LanesConfig = field(default_factory=LanesConfig)
    lock_timeout_seconds: Annotated[float, Field(ge=0)] = 60.0
