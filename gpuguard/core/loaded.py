"""Whose module the running kernel has loaded."""

from __future__ import annotations

from collections.abc import Iterable

from gpuguard.core.facts import BuildRecord, DriverFacts


def loaded_identity(driver: DriverFacts, records: Iterable[BuildRecord] | None) -> str:
    """``patched``, ``stock``, ``none`` or ``unknown``.

    Args:
        driver: what is loaded.
        records: our builds for the running kernel; None: which one runs is not known.
    """
    if driver.loaded is None and driver.loaded_build_id is None:
        return "none"
    if driver.loaded_build_id is None or records is None:
        return "unknown"
    ours = {build_id for record in records for _, build_id in record.build_ids}
    return "patched" if driver.loaded_build_id in ours else "stock"
