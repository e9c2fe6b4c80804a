"""vLLM's files of what it once found out about P2P: ``gpu_p2p_access_cache_for_*.json``.

vLLM writes one if it is not there and then believes it for ever: neither driver nor kernel nor
boot is part of the name. Content: ``{"0->1": true, …}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from gpuguard.core.doctor_facts import ServingUnit, Unread, VllmCache
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import absent_is_none, list_dir, read_text

_NAME = "gpu_p2p_access_cache_for_*.json"
_PAIR = re.compile(r"(\d+)->(\d+)")


def probe_vllm_caches(
    host: Host, units: Iterable[ServingUnit]
) -> tuple[tuple[VllmCache, ...], tuple[Unread, ...]]:
    """Cache files of the services' folders, and what could not be looked at."""
    folders = dict.fromkeys(folder for unit in units for folder in unit.cache_dirs)
    found, unread = [], []
    for folder in folders:
        try:
            names = [name for name in list_dir(host, folder) if fnmatchcase(name, _NAME)]
            found += [_cache(host, f"{folder}/{name}") for name in names]
        except (ProbeError, OSError) as error:
            unread.append(Unread(folder, str(error)))
    return tuple(found), tuple(unread)


def parse_vllm_cache(text: str) -> tuple[int, int] | None:
    """(cards, pairs refused); None if it is not what vLLM writes."""
    try:
        pairs = {_PAIR.fullmatch(key): bool(value) for key, value in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError):
        return None
    indexes = {int(index) for match in pairs if match for index in match.groups()}
    if not indexes or None in pairs:
        return None
    return len(indexes), sum(not granted for granted in pairs.values())


def _cache(host: Host, path: str) -> VllmCache:
    with absent_is_none(path):
        modified = host.path(path).stat().st_mtime
    parsed = parse_vllm_cache(read_text(host, path) or "")
    cards, refused = parsed or (None, 0)
    return VllmCache(path=path, modified=modified, cards=cards, refused=refused)
