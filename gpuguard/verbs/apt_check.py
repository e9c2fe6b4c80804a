"""Before apt installs a kernel or driver: is there a patched source for it."""

from __future__ import annotations

from collections.abc import Iterator

from gpuguard.build import blockers, patch_files
from gpuguard.build import source as sources
from gpuguard.build.records import Blocker
from gpuguard.build.trust import trust_in
from gpuguard.config import Config
from gpuguard.core.apt_check import Objection, objections, parse_packages
from gpuguard.errors import ProbeError
from gpuguard.host import Host
from gpuguard.probes.driver import probe_driver
from gpuguard.state import module_tree


def check(host: Host, config: Config, listed: str) -> tuple[Objection, ...]:
    """What speaks against the transaction that apt is about to begin.

    Args:
        host: where.
        config: what is wanted.
        listed: apt's lines about packages, protocol 3.
    """
    upgrade = parse_packages(listed)
    kernels = (*upgrade.new_kernels, *upgrade.renewed_kernels)
    if not kernels and upgrade.driver_version is None:
        return ()
    driver = config.driver_version or upgrade.driver_version or _installed(host)
    return objections(
        upgrade,
        driver=driver,
        source=tuple(_source_problems(host, config, driver)),
        headers=[r for r in kernels if host.path(f"{module_tree(r)}/build").exists()],
    )


def _installed(host: Host) -> str | None:
    try:
        return probe_driver(host).userland
    except ProbeError:
        return None


def _source_problems(host: Host, config: Config, driver: str | None) -> Iterator[tuple[str, str]]:
    """What keeps the patched modules of this version from being built, whatever the kernel."""
    for blocker in _blockers(host, config, driver):
        yield blocker.message, blocker.hint


def _blockers(host: Host, config: Config, driver: str | None) -> Iterator[Blocker]:
    if driver is None:
        yield from blockers.version(driver)
        return
    try:
        trust = trust_in(config.source.trusted_owner)
    except KeyError:  # sources.probe says so
        trust = trust_in(None)
    source = sources.probe(host, config.source, driver)
    patches, missing = patch_files.find(host, config.source.patches, driver, trust)
    yield from source.blockers
    yield from missing
    yield from blockers.unpatched(source.state, patches, config)
