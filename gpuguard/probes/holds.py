"""Facts about holds: dpkg's selections, our ledger, and who changed what is ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpuguard.core.holds import HoldFacts
from gpuguard.core.packages import Package
from gpuguard.errors import ProbeError, StateError
from gpuguard.host import Host
from gpuguard.ledger import read_ledger, read_withheld
from gpuguard.probes.dpkg import read_packages
from gpuguard.probes.package_logs import probe_package_logs


def probe_holds(host: Host, packages: Mapping[str, Package] | None = None) -> HoldFacts:
    """What dpkg and our records say; what cannot be read is a problem in the facts.

    Args:
        host: to look at.
        packages: what ``read_packages`` said, if it was asked already.
    """
    try:
        known = read_packages(host) if packages is None else packages
        facts = HoldFacts(packages=known, ledger=read_ledger(host), withheld=read_withheld(host))
    except (ProbeError, StateError, OSError) as error:
        return HoldFacts(problem=str(error))
    changed = _changed(facts)
    if not changed:
        return facts
    since = {name: facts.book.packages[name].since for name in changed}
    return replace(facts, evidence=probe_package_logs(host, changed, since))


def _changed(facts: HoldFacts) -> list[str]:
    """Ours that lost their hold, or whose version is another; logs are read for these only."""
    return [
        name
        for name, entry in facts.book.packages.items()
        if (package := facts.packages.get(name)) is not None
        and not package.is_gone
        and (not package.is_held or package.version != entry.version)
    ]
