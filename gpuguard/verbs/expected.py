"""The cards that must be there: as configured, else as accepted, else the PCI bus."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from gpuguard.core.expectation import Expectation, Origin
from gpuguard.host.port import Host

if TYPE_CHECKING:
    from gpuguard.config import Config


def has_config(host: Host, file: str) -> bool:
    """False only if there is neither the file nor its drop-in folder: then none need be read."""
    for path in (file, str(PurePosixPath(file).with_suffix(".d"))):
        try:
            host.path(path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass  # reading it will say what is wrong
        return True
    return False


def expectation_of(config: Config | None, accepted: Expectation | None) -> Expectation:
    """Who says it; what the PCI bus shows is left to ``Expectation.on_bus``."""
    if config is None:
        return accepted or Expectation()
    p2p = config.p2p
    if p2p.gpus or p2p.groups or p2p.expected_gpus is not None:
        return Expectation(
            origin=Origin.CONFIGURATION,
            count=p2p.expected_gpus,
            cards=p2p.gpus or tuple(card for group in p2p.groups for card in group),
            groups=p2p.groups,
            exclude=p2p.exclude,
        )
    return replace(accepted or Expectation(), exclude=p2p.exclude)
