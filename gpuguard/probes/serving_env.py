"""Services that compute on the cards, and the variables that decide whether they use P2P.

Looked at: systemd services with drop-ins, quadlets, ``docker run`` lines, compose files that a
unit starts, ``/etc/nccl.conf``. Not looked at: containers that no unit starts, Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpuguard.core.doctor_facts import ServingUnit, Setting, Unread
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text
from gpuguard.probes.compose import DEFAULT_NAMES, ComposeService, read_compose
from gpuguard.probes.environment import (
    ContainerArguments,
    Settings,
    parse_command,
    parse_env_file,
    parse_environment,
    read_env_files,
    with_source,
)
from gpuguard.probes.unit_files import UNIT_FOLDERS, UnitFile, probe_units

_SERVES = re.compile(
    r"\b(?:vllm|sglang|tritonserver|lmdeploy|llama-server|text-generation-launcher)\b"
    r"|\b(?:NCCL|VLLM)_[A-Z]|--gpus\b|nvidia\.com/gpu|--runtime[= ]nvidia|driver: nvidia",
    re.IGNORECASE,
)
_NCCL_CONFIG = "/etc/nccl.conf"
_EXEC = ("ExecStart", "ExecStartPre")
_VOLUMES = "/var/lib/docker/volumes"


@dataclass(slots=True)
class _Draft:
    """What is known so far of one service."""

    settings: Settings = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    in_container: bool = False


def probe_serving(host: Host) -> tuple[ServingUnit, ...] | Unread:
    """Every serving unit, sorted by name; a template stands for its enabled instances."""
    try:
        units = probe_units(host)
        homes = _homes(host)
        nccl = with_source(parse_env_file(read_text(host, _NCCL_CONFIG) or ""), _NCCL_CONFIG)
        enabled = _enabled(host)
    except ProbeError as error:
        return Unread("/etc/systemd/system", error.message)
    found: list[ServingUnit] = []
    for unit in units:
        for name in _instances(unit.name, enabled):
            found += _serving(host, unit, name, homes, nccl)
    return tuple(found)


def _serving(
    host: Host, unit: UnitFile, name: str, homes: dict[str, str], nccl: Settings
) -> Iterator[ServingUnit]:
    user = unit.value("User") or "root"
    home = homes.get(user, "/root" if user == "root" else f"/home/{user}")
    commands = [parse_command(_expand(a.value, name)) for key in _EXEC for a in unit.values(key)]
    services, problems = _compose(host, unit, commands, name)
    for service in services:
        draft = _Draft(service.settings, list(service.unread), list(service.volumes), True)  # noqa: FBT003
        yield _unit(f"{name}/{service.name}", unit, user, home, draft)
    if not _SERVES.search(f"{unit.name}\n{unit.text}") and not problems:
        return
    if not services:
        draft = _draft(host, unit, name, commands, nccl)
        draft.unread += problems
        yield _unit(name, unit, user, home, draft)


def _draft(
    host: Host, unit: UnitFile, name: str, commands: list[ContainerArguments], nccl: Settings
) -> _Draft:
    own = _unit_settings(host, unit, name)
    own.in_container = unit.name.endswith(".container") or any(c.is_container for c in commands)
    own.volumes += [a.value for a in unit.values("Volume")]
    own.unread += [Unread(unit.path, why) for why in unit.unread]
    outer = {} if own.in_container else dict(nccl)
    if not unit.name.endswith(".container") and own.in_container:
        # A container sees of the unit's environment what its command line hands on.
        inherited = {word for command in commands for word in command.inherited}
        own.settings = {k: v for k, v in own.settings.items() if k in inherited}
    own.settings = outer | own.settings
    for command in commands:
        for file in command.env_files:
            found, problems = read_env_files(host, file)
            own.settings |= found
            own.unread += problems
        own.settings |= with_source(command.settings, unit.path)
        own.volumes += command.volumes
    return own


def _unit_settings(host: Host, unit: UnitFile, name: str) -> _Draft:
    """``Environment=``, then ``EnvironmentFile=``, which wins (systemd.exec(5))."""
    draft = _Draft()
    for assignment in unit.values("Environment"):
        text = _expand(assignment.value, name)
        draft.settings |= with_source(parse_environment(text), assignment.source)
    for assignment in unit.values("EnvironmentFile"):
        found, problems = read_env_files(host, _expand(assignment.value, name))
        draft.settings |= found
        draft.unread += problems
    for assignment in unit.values("UnsetEnvironment"):
        for word in assignment.value.split():
            draft.settings.pop(word, None)
    return draft


def _compose(
    host: Host, unit: UnitFile, commands: list[ContainerArguments], name: str
) -> tuple[list[ComposeService], list[Unread]]:
    services: list[ComposeService] = []
    problems: list[Unread] = []
    folder = _expand(unit.value("WorkingDirectory"), name) or "/"
    for command in commands:
        if not command.is_compose:
            continue
        for file in command.compose_files or [f"{folder}/{n}" for n in DEFAULT_NAMES]:
            path = file if file.startswith("/") else f"{folder}/{file}"
            try:
                services += read_compose(host, path, _SERVES)
            except ProbeError as error:
                problems.append(Unread(path, error.message))
    return services, problems


def _unit(name: str, unit: UnitFile, user: str, home: str, draft: _Draft) -> ServingUnit:
    return ServingUnit(
        name=name,
        path=unit.path,
        user=user,
        environment=tuple(sorted(draft.settings.items())),
        unread=tuple(draft.unread),
        cache_dirs=tuple(dict.fromkeys(_cache_dirs(draft, home))),
    )


def _cache_dirs(draft: _Draft, home: str) -> Iterator[str]:
    """Where vLLM keeps caches; for a container, what of that is mounted from the host."""
    inner_home = "/root" if draft.in_container else home
    cache_home = draft.settings.get("XDG_CACHE_HOME", Setting(f"{inner_home}/.cache", ""))
    root = draft.settings.get("VLLM_CACHE_ROOT", Setting(f"{cache_home.value}/vllm", "")).value
    if not draft.in_container:
        yield root
        return
    for volume in draft.volumes:
        outside, _, inside = volume.partition(":")
        inside = inside.partition(":")[0].rstrip("/")
        if inside and (root == inside or root.startswith(f"{inside}/")):
            top = outside if outside.startswith("/") else f"{_VOLUMES}/{outside}/_data"
            yield top + root.removeprefix(inside)


def _expand(text: str, name: str) -> str:
    """The specifiers of systemd.unit(5) that name the unit itself."""
    full = name.rpartition(".")[0] or name
    prefix, _, instance = full.partition("@")
    for mark, value in (
        ("%i", instance),
        ("%I", instance),
        ("%n", name),
        ("%N", full),
        ("%p", prefix),
    ):
        text = text.replace(mark, value)
    return text


def _instances(name: str, enabled: frozenset[str]) -> list[str]:
    head, at, _ = name.partition("@.")
    if not at:
        return [name]
    return sorted(unit for unit in enabled if unit.startswith(f"{head}@"))


def _enabled(host: Host) -> frozenset[str]:
    """Names below ``*.wants`` and ``*.requires``: instances of templates that boot would start."""
    return frozenset(
        unit
        for folder in UNIT_FOLDERS
        for name in list_dir(host, folder)
        if Path(name).suffix in (".wants", ".requires")
        for unit in list_dir(host, f"{folder}/{name}")
    )


def _homes(host: Host) -> dict[str, str]:
    lines = (line.split(":") for line in (read_text(host, "/etc/passwd") or "").splitlines())
    return {fields[0]: fields[5] for fields in lines if len(fields) > 5}  # noqa: PLR2004 - passwd(5)
