"""Options of ``gpuguard verify`` that go with ``--deep``; apart, to keep plain verify quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from gpuguard.errors import UsageError

DEFAULT_MIB = 256

Deep = Annotated[
    bool, typer.Option("--deep", help="Move bytes over every ordered pair, and compare them.")
]
Size = Annotated[
    int,
    typer.Option(
        "--size", metavar="MIB", min=1, max=16384,
        help="With --deep: longest transfer; each card of a pair gives that much memory.",
    ),
]  # fmt: skip
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu", metavar="CARD",
        help="With --deep: only this card (index, UUID or PCI bus id); several times for several.",
    ),
]  # fmt: skip
Beside = Annotated[
    bool,
    typer.Option("--beside-workloads", help="With --deep: also while processes compute."),
]
AllReduce = Annotated[
    bool,
    typer.Option(
        "--all-reduce/--no-all-reduce",
        help="With --deep: NCCL's all-reduce with P2P on against off.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepOptions:
    """What was asked for."""

    mib: int
    only: tuple[str, ...]
    beside: bool
    all_reduce: bool


def deep_options(
    *, deep: bool, mib: int, only: list[str] | None, beside: bool, all_reduce: bool
) -> DeepOptions | None:
    """The options together; None without ``--deep``.

    Raises:
        UsageError: an option that means nothing without it.
    """
    if deep:
        return DeepOptions(mib=mib, only=tuple(only or ()), beside=beside, all_reduce=all_reduce)
    given: Mapping[str, bool] = {
        "--size": mib != DEFAULT_MIB,
        "--gpu": bool(only),
        "--beside-workloads": beside,
        "--no-all-reduce": not all_reduce,
    }
    for option, is_given in given.items():
        if is_given:
            raise UsageError(f"{option} goes with --deep")
    return None
