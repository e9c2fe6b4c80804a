"""Checks of the serving stack: does it use the P2P that is there (SERVING.md, 1.3)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from gpuguard.core.assess import Assessment
from gpuguard.core.doctor_check import Cause, Check, conclude, not_applicable, not_read, plural
from gpuguard.core.doctor_facts import DoctorFacts, ServingUnit, Unread, VllmCache
from gpuguard.core.doctor_link import widest_path
from gpuguard.core.findings import Severity

#: nccl graph/paths.cc: words from near to far; anything else is ignored without a word.
_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")  # by number, 0 to 5
_DEFAULT = "PXB"
_AMD_PAIR = 2  # an AMD host with at most two cards has SYS by default


def check_nccl(facts: DoctorFacts, assessment: Assessment | None) -> Check:
    """Serving units let NCCL use P2P over the distance that the cards have."""
    if isinstance(facts.units, Unread):
        return conclude("nccl", "", [not_read("units", facts.units, code="nccl-unknown")])
    if not facts.units:
        return not_applicable("nccl", "no systemd unit or quadlet of a serving engine was found")
    needed = needed_level(facts)
    granted = assessment.p2p_healthy if assessment else None
    causes: list[Cause] = []
    notes: list[str] = []
    for unit in facts.units:
        causes += [not_read(unit.name, unread, code="nccl-unknown") for unread in unit.unread]
        causes += _disabled(unit, granted)
        causes += _level(unit, needed)
        notes += _notes(unit, granted)
    path = f", the cards are {needed} apart" if needed else ""
    return conclude("nccl", f"{plural(len(facts.units), 'serving unit')}{path}", causes, notes)


def needed_level(facts: DoctorFacts) -> str | None:
    """The level that NCCL must be told; None: its default will do, or it cannot be told."""
    cards = facts.own_cards()
    path = widest_path(cards)
    is_amd = facts.virt.cpu_vendor == "AuthenticAMD"
    default = "SYS" if is_amd and len(cards) <= _AMD_PAIR else _DEFAULT
    if path is None or _LEVELS.index(path) <= _LEVELS.index(default):
        return None
    return path


def parse_level(value: str) -> str | None:
    """What NCCL makes of ``NCCL_P2P_LEVEL``; None: it ignores the value."""
    if value in _LEVELS:
        return value
    if value[:1].isdecimal():
        digits = "".join(ch for ch in value if ch.isdecimal())
        return _OLD_LEVELS[min(int(digits), len(_OLD_LEVELS) - 1)]
    return None


def _is_disabled(unit: ServingUnit) -> bool:
    setting = unit.setting("NCCL_P2P_DISABLE")
    return setting is not None and setting.value.strip() == "1"  # NCCL compares with 1


def _disabled(unit: ServingUnit, granted: bool | None) -> Iterator[Cause]:  # noqa: FBT001 - a three-valued answer
    setting = unit.setting("NCCL_P2P_DISABLE")
    if setting is not None and _is_disabled(unit) and granted is not False:
        yield Cause(
            code="nccl-p2p-disabled",
            severity=Severity.WARNING,
            subject=unit.name,
            message="NCCL_P2P_DISABLE=1: P2P paid for, switched off",
            remedy=f"remove it from {setting.source}, restart {unit.name}; if NCCL then hangs, "
            "the other checks name suspects",
            source=setting.source,
            evidence={"unit": unit.path},
        )


def _level(unit: ServingUnit, needed: str | None) -> Iterator[Cause]:
    setting = unit.setting("NCCL_P2P_LEVEL")
    if _is_disabled(unit) or (setting is None and needed is None):
        return
    level = parse_level(setting.value) if setting else None
    effective = _LEVELS.index(level or _DEFAULT)
    if needed is not None:
        if effective >= _LEVELS.index(needed):
            return
        why = f"the cards are behind the CPU ({needed})"
    elif level in _LEVELS[:4]:  # nearer than any PCIe path
        needed, why = _DEFAULT, f"{level} leaves PCIe out"
    else:
        return
    said = "NCCL_P2P_LEVEL is not set" if setting is None else f"NCCL_P2P_LEVEL={setting.value}"
    if setting is not None and level is None:
        said += " (NCCL does not know that word and ignores it)"
    yield Cause(
        code="nccl-p2p-level",
        severity=Severity.WARNING,
        subject=unit.name,
        message=f"{said}, and {why}: NCCL goes through host memory",
        remedy=f"Environment=NCCL_P2P_LEVEL={needed} for {unit.name} (systemctl edit; "
        "containers: -e), then restart it",
        source=setting.source if setting else unit.path,
        evidence={"unit": unit.path, "needed": needed},
    )


def _notes(unit: ServingUnit, granted: bool | None) -> Iterator[str]:  # noqa: FBT001
    if _is_disabled(unit) and granted is False:
        yield f"{unit.name}: NCCL_P2P_DISABLE=1 is right as long as P2P is not granted"
    setting = unit.setting("VLLM_SKIP_P2P_CHECK")
    if setting is not None and setting.value.strip() == "0":
        yield f"{unit.name}: VLLM_SKIP_P2P_CHECK=0: vLLM believes its cache file, see vllm-cache"


def check_vllm_cache(facts: DoctorFacts, assessment: Assessment | None) -> Check:
    """No P2P cache of vLLM is older than the boot, the driver or the set of cards."""
    if isinstance(facts.units, Unread) or not facts.units:
        return not_applicable("vllm-cache", "no serving units, so no place to look in")
    causes = [
        not_read(unread.place, unread, code="vllm-cache-unknown") for unread in facts.unread_caches
    ]
    granted = assessment.p2p_healthy if assessment else None
    judged = [(cache, list(_stale(cache, facts, granted))) for cache in facts.caches]
    causes += [_stale_cause(cache, reasons) for cache, reasons in judged if reasons]
    count = len(facts.caches)
    fine = "no cache file" if not count else f"{plural(count, 'cache file')}, of this boot"
    return conclude("vllm-cache", fine, causes)


def _stale(cache: VllmCache, facts: DoctorFacts, granted: bool | None) -> Iterator[str]:  # noqa: FBT001
    cards = facts.cards if isinstance(facts.cards, tuple) else None
    if cache.cards is None:
        yield "its content is not what vLLM writes"
    elif cards is not None and cache.cards > len(cards):
        yield f"it is about {cache.cards} cards, there are {len(cards)}"
    if facts.built is not None and cache.modified < facts.built:
        yield "it is older than the loaded modules"
    elif facts.booted is not None and cache.modified < facts.booted:
        yield "it was written before this boot"
    if cache.refused and granted:
        yield f"it calls {plural(cache.refused, 'pair')} inaccessible that the driver grants"


def _stale_cause(cache: VllmCache, reasons: list[str]) -> Cause:
    modified = datetime.fromtimestamp(cache.modified, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Cause(
        code="vllm-cache-stale",
        severity=Severity.WARNING,
        subject=cache.path,
        message=f"{'; '.join(reasons)}; vLLM believes it for ever (with VLLM_SKIP_P2P_CHECK=0)",
        remedy=f"rm {cache.path}; vLLM finds out anew at its next start",
        source=cache.path,
        evidence={"modified": modified},
    )
