"""Read lane files: ``/etc/gpuguard/lanes/NAME.yaml``, strictly, all problems at once."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from gpuguard.config_check import UNKNOWN_KEY, origin_of, unknown_key, value_words
from gpuguard.config_yaml import KeyPath, Origin, Problem, key_text, parse_document
from gpuguard.errors import ConfigError
from gpuguard.host import Host
from gpuguard.host.files import writable_by_others
from gpuguard.serving.lane import NAME, NAME_RULE, Lane, lane_adapter, wrong_numbers
from gpuguard.state import LANES_DIR

if typing.TYPE_CHECKING:
    from pathlib import Path

    from pydantic_core import ErrorDetails

_MAX_BYTES = 1 << 20
_SUFFIX = ".yaml"
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_ARGUMENT = "must be text, a number, true or false, a list of texts and numbers, or a mapping"


class InvalidLaneError(ConfigError):
    """The file was read and is wrong; ``problems`` has every reason."""

    code = "lane-invalid"

    def __init__(self, file: str, problems: Sequence[Problem]) -> None:
        super().__init__(
            f"{file}: {len(problems)} problem{'s' if len(problems) > 1 else ''} in the lane",
            detail="\n".join(map(str, problems)),
            hint="correct the file, then run: gpuguard lane validate",
        )
        self.problems = tuple(problems)


def lane_file(name: str) -> str:
    """Where a lane is declared."""
    return f"{LANES_DIR}/{name}{_SUFFIX}"


def lane_names(host: Host) -> tuple[str, ...]:
    """Names of the lanes that are declared, sorted; files of other names are not looked at.

    Raises:
        ConfigError: the folder cannot be read.
    """
    stems = (name.removesuffix(_SUFFIX) for name in _entries(host) if name.endswith(_SUFFIX))
    return tuple(sorted(stem for stem in stems if NAME.fullmatch(stem)))


def ignored_files(host: Host) -> tuple[str, ...]:
    """Files in the folder that look like lanes, and are none because of how they are called.

    Raises:
        ConfigError: the folder cannot be read.
    """
    return tuple(sorted(
        f"{LANES_DIR}/{name}"
        for name in _entries(host)
        if name.casefold().endswith((_SUFFIX, ".yml"))
        and not name.startswith(".")
        and not (name.endswith(_SUFFIX) and NAME.fullmatch(name.removesuffix(_SUFFIX)))
    ))  # fmt: skip


def _entries(host: Host) -> tuple[str, ...]:
    try:
        return tuple(entry.name for entry in host.path(LANES_DIR).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise _unreadable(LANES_DIR, error) from error


def read_lane(host: Host, name: str) -> Lane:
    """A declared lane.

    Raises:
        ConfigError: no file (``lane-missing``), not to be trusted (``lane-untrusted``),
            unreadable (``lane-unreadable``), or wrong (``InvalidLaneError``).
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"there is no lane {name}", code="lane-missing", hint=f"a lane's name: {NAME_RULE}"
        )
    return read_lane_file(host, lane_file(name), name)


def read_lane_file(host: Host, file: str, name: str | None = None) -> Lane:
    """A lane from any file, such as one that is to be put in place.

    Raises:
        ConfigError: as ``read_lane``.
    """
    try:
        path = host.path(file)
        _refuse_untrusted(host, file)
        content = _content(path, file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(host, file, name) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    if len(content) > _MAX_BYTES:
        raise InvalidLaneError(file, [Problem(file, "", f"longer than {_MAX_BYTES} bytes")])
    return parse_lane(content.decode("utf-8", "replace"), file, name)


def _content(path: Path, file: str) -> bytes:
    # Without O_NONBLOCK, opening a pipe waits for somebody to write into it
    descriptor = os.open(path, _FLAGS)
    with os.fdopen(descriptor, "rb", buffering=0) as source:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _odd(file, "is not a regular file")
        return source.read(_MAX_BYTES + 1)


def parse_lane(text: str, file: str, name: str | None = None) -> Lane:
    """A lane from the text of its file.

    Raises:
        InvalidLaneError: it is none.
    """
    document = parse_document(text, file)
    problems = list(document.problems)
    if not problems and document.data is None:
        problems.append(Problem(file, "", "is empty"))
    if problems:
        raise InvalidLaneError(file, problems)
    lane = lane_of(document.data, file, document.origins)
    if wrong := [Problem(file, f"args.{flag}", why) for flag, why in wrong_numbers(lane)]:
        raise InvalidLaneError(file, wrong)
    if name is not None and lane.name != name:
        said = f"is {lane.name!r}, and the file is called {name}{_SUFFIX}"
        raise InvalidLaneError(file, [Problem(file, "name", said)])
    return lane


def lane_of(values: Any, file: str, origins: Mapping[KeyPath, Origin] | None = None) -> Lane:
    """A lane from plain values.

    Args:
        values: they.
        file: where they are from.
        origins: how each was spelled there.

    Raises:
        InvalidLaneError: they are none.
    """
    try:
        return lane_adapter().validate_python(values)
    except ValidationError as error:
        found = [
            _problem(detail, file, origins or {}) for detail in error.errors(include_url=False)
        ]
        raise InvalidLaneError(file, list(dict.fromkeys(found))) from error


def _problem(detail: ErrorDetails, file: str, origins: Mapping[KeyPath, Origin]) -> Problem:
    location = detail["loc"]
    if location[:1] == ("args",) and len(location) > 1:
        # pydantic names every member of the union, too: args.x.bool, args.x.str
        return Problem(file, key_text(location[:2]), _ARGUMENT)
    if detail["type"] in UNKNOWN_KEY:
        *at, key = location
        said = unknown_key(str(key), tuple(at), _keys_at(at), _keys())
    else:
        said = value_words(detail, origin_of(location, origins))
    return Problem(file, key_text(location), said)


def _keys(record: type = Lane, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key of a lane but those within lists."""
    hints = typing.get_type_hints(record)
    for name in _fields(record):
        yield (*prefix, name)
        if dataclasses.is_dataclass(hints[name]):
            yield from _keys(hints[name], (*prefix, name))


def _keys_at(path: Sequence[str | int]) -> tuple[str, ...]:
    record: Any = Lane
    for step in path:
        record = (
            typing.get_args(record)[0]  # of tuple[Patch, ...]
            if isinstance(step, int)
            else typing.get_type_hints(record)[step]
        )
    return _fields(record)


def _fields(record: type) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(record) if one.init)


def kept_lane(values: Any, file: str, lane_id: str) -> Lane:
    """A lane that was kept by some gpuguard, under the id that it has there.

    What this one does not know any more is left out: the files that run the lane are kept, too,
    and going back must not fail because of a key.

    Raises:
        InvalidLaneError: what is left is no lane.
    """
    values = json.loads(json.dumps(values))
    if isinstance(values, dict) and isinstance(requires := values.get("requires"), dict):
        requires.setdefault("proof", "grant")  # that is what it meant before there was a choice
    while True:
        try:
            lane = lane_adapter().validate_python(values)
        except ValidationError as error:
            unknown = [one["loc"] for one in error.errors() if one["type"] in UNKNOWN_KEY]
            if not unknown:
                return lane_of(values, file)
            for location in unknown:
                _drop(values, location)
        else:
            object.__setattr__(lane, "kept_id", lane_id)
            return lane


def _drop(values: Any, location: tuple[str | int, ...]) -> None:
    for step in location[:-1]:
        values = values[step]
    del values[location[-1]]


def _refuse_untrusted(host: Host, file: str) -> None:
    if os.geteuid() != 0:
        return
    reason = writable_by_others(host.root / file.lstrip("/"), root=host.root)
    if reason is not None:
        raise ConfigError(
            f"{file}: refused, {reason}",
            code="lane-untrusted",
            hint="what a lane says is run by root's systemd: "
            f"chown root:root {file}; chmod go-w {file}",
        )


def _missing(host: Host, file: str, name: str | None) -> ConfigError:
    place = host.path(file, follow=False)
    if place.is_symlink():
        return _odd(file, f"is a symbolic link to nothing ({place.readlink()})")
    if name is None:
        hint = "a file is given by its absolute path, a lane by its name"
        return ConfigError(f"there is no file {file}", code="lane-missing", hint=hint)
    names = lane_names(host)
    there = f"there are: {', '.join(names)}" if names else f"there is none in {LANES_DIR} yet"
    return ConfigError(
        f"there is no lane {name}",
        code="lane-missing",
        hint=f"{there}; gpuguard lane init writes one from a preset",
    )


def _odd(file: str, what: str) -> ConfigError:
    return ConfigError(
        f"{file}: {what}",
        code="lane-unreadable",
        hint=f"put the lane's file there, or take it away: rm {file}",
    )


def _unreadable(file: str, error: OSError) -> ConfigError:
    is_denied = isinstance(error, PermissionError)
    return ConfigError(
        f"{file}: cannot be read: {error.strerror or error}",
        code="lane-unreadable",
        hint="run as root" if is_denied else f"what is it, and on which disk: ls -ld {file}",
    )
