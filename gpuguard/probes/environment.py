"""Environment variables where services write them: unit lines, env files, container arguments.

Only the variables that matter for P2P are kept: env files also hold secrets.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuguard.core.doctor_facts import Setting, Unread
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, read_text

WANTED = (
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_DISABLE",
    "VLLM_SKIP_P2P_CHECK",
    "VLLM_CACHE_ROOT",
    "XDG_CACHE_HOME",
)
_ENGINES = ("docker", "podman", "nerdctl")

Settings = dict[str, Setting]


@dataclass(slots=True)
class ContainerArguments:
    """What a ``docker run`` line gives its container; ``inherited`` names have no value."""

    is_container: bool = False
    settings: list[tuple[str, str]] = field(default_factory=list)
    inherited: list[str] = field(default_factory=list)
    env_files: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    compose_files: list[str] = field(default_factory=list)
    is_compose: bool = False


def split_words(line: str) -> list[str]:
    """Words as systemd and a shell split them; an open quotation mark splits at blanks."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def parse_environment(line: str) -> Iterator[tuple[str, str]]:
    """``"A=b c" D=e`` of an ``Environment=`` line; wanted names only."""
    for word in split_words(line):
        yield from _wanted(word)


def parse_env_file(text: str) -> Iterator[tuple[str, str]]:
    """``NAME=value`` lines; comments begin with ``#`` or ``;``, quotation marks go."""
    for raw in text.splitlines():
        line = raw.strip()
        if line and not line.startswith(("#", ";")):
            name, _, value = line.removeprefix("export ").partition("=")
            yield from _wanted(f"{name.strip()}={_unquoted(value.strip())}")


def parse_command(line: str) -> ContainerArguments:
    """What matters in an ``Exec`` line: assignments, and a container engine's options."""
    found = ContainerArguments()
    words = [word.lstrip("-@:+!") if at == 0 else word for at, word in enumerate(split_words(line))]
    found.is_container = any(Path(word).name in _ENGINES for word in words[:2])
    found.is_compose = any(Path(word).name == "docker-compose" for word in words[:1]) or (
        found.is_container and "compose" in words
    )
    for option, value in _options(words):
        match option:
            case "-e" | "--env" if "=" in value:
                found.settings += _wanted(value)
            case "-e" | "--env":
                found.inherited.append(value)
            case "--env-file":
                found.env_files.append(value)
            case "-v" | "--volume":
                found.volumes.append(value)
            case "-f" | "--file" if found.is_compose:
                found.compose_files.append(value)
            case "":
                found.settings += _wanted(value)
    return found


def read_env_files(host: Host, pattern: str) -> tuple[Settings, list[Unread]]:
    """An ``EnvironmentFile=`` value: ``-`` allows it to be missing, the name may be a pattern."""
    path = pattern.removeprefix("-").strip()
    settings: Settings = {}
    unread: list[Unread] = []
    if "%" in path or not path.startswith("/"):
        return settings, [Unread(path, "its name depends on the unit's instance or folder")]
    for file in _matching(host, path):
        try:
            text = read_text(host, file) or ""
        except ProbeError as error:
            unread.append(Unread(file, error.message.rpartition(": ")[2]))
            continue
        settings |= with_source(parse_env_file(text), file)
    return settings, unread


def with_source(pairs: Iterable[tuple[str, str]], source: str) -> Settings:
    """Pairs as settings of one file."""
    return {name: Setting(value, source) for name, value in pairs}


def mapping_settings(values: Mapping[object, object], source: str) -> Settings:
    """``environment:`` of a compose file as a mapping; null inherits and is left out."""
    return {
        str(name): Setting(_scalar(value), source)
        for name, value in values.items()
        if name in WANTED and value is not None
    }


def _scalar(value: object) -> str:
    # YAML's true would reach the container as "true", docker compose(5)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """(option, value) for options that take one, ("", word) for the rest."""
    takes_value = ("-e", "--env", "--env-file", "-v", "--volume", "-f", "--file")
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        if words[at] in takes_value and at + 1 < len(words):
            yield words[at], words[at + 1]
            at += 1
        elif equals and name in takes_value:
            yield name, value
        else:
            yield "", words[at]
        at += 1


def _wanted(word: str) -> list[tuple[str, str]]:
    name, equals, value = word.partition("=")
    return [(name, value)] if equals and name in WANTED else []


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value


def _matching(host: Host, path: str) -> list[str]:
    if not any(mark in path for mark in "*?["):
        return [path]
    folder = str(Path(path).parent)
    try:
        names = list_dir(host, folder)
    except ProbeError:
        return [path]  # reading it will say why
    return [f"{folder}/{name}" for name in names if Path(name).match(Path(path).name)]
