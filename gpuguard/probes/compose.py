"""Docker compose files that a unit starts: environment and cache volumes of their services."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuguard.core.doctor_facts import Unread
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import read_text
from gpuguard.probes.environment import (
    Settings,
    mapping_settings,
    parse_environment,
    read_env_files,
    with_source,
)

DEFAULT_NAMES = ("compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml")


@dataclass(frozen=True, slots=True)
class ComposeService:
    """One service that computes on the cards; ``volumes`` as ``host:container``."""

    name: str
    settings: Settings
    volumes: tuple[str, ...]
    unread: tuple[Unread, ...]


def read_compose(host: Host, path: str, serves: re.Pattern[str]) -> Iterator[ComposeService]:
    """Services of a compose file whose text matches ``serves``.

    Raises:
        ProbeError: the file cannot be read, or is no compose file.
    """
    import yaml

    text = read_text(host, path)
    if text is None:
        return
    try:
        document = yaml.safe_load(text)
        services = document.get("services") or {}
        for name, service in services.items():
            if serves.search(yaml.safe_dump(service)):
                yield _service(host, path, str(name), service)
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ProbeError(f"{path} is no compose file: {error}") from error


def _service(host: Host, path: str, name: str, service: dict[str, Any]) -> ComposeService:
    settings: Settings = {}
    unread: list[Unread] = []
    for file in _env_files(service.get("env_file")):
        absolute = file if file.startswith("/") else str(Path(path).parent / file)
        found, problems = read_env_files(host, absolute)
        settings |= found
        unread += problems
    environment = service.get("environment") or {}
    if isinstance(environment, dict):
        settings |= mapping_settings(environment, path)
    else:
        for word in environment:
            settings |= with_source(parse_environment(f'"{word}"'), path)
    volumes = tuple(_volumes(service.get("volumes") or []))
    return ComposeService(name, settings, volumes, tuple(unread))


def _env_files(value: object) -> Iterator[str]:
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, dict):
            entry = entry.get("path")  # noqa: PLW2901 - the long form of the same thing
        if entry:
            yield str(entry)


def _volumes(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, dict):
            yield f"{entry.get('source', '')}:{entry.get('target', '')}"
        else:
            yield str(entry)
