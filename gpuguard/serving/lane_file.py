"""Read lane files: ``/etc/gpuguard/lanes/NAME.yaml``, strictly, all problems at once."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from gpuguard.config_yaml import Problem, key_text, parse_document
from gpuguard.errors import ConfigError
from gpuguard.host import Host
from gpuguard.host.files import writable_by_others
from gpuguard.serving.lane import NAME, Lane, lane_adapter, wrong_numbers
from gpuguard.state import LANES_DIR

_MAX_BYTES = 1 << 20
_SUFFIX = ".yaml"
_UNKNOWN = frozenset({"unexpected_keyword_argument", "extra_forbidden"})


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
    try:
        names = [entry.name for entry in host.path(LANES_DIR).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise _unreadable(LANES_DIR, error) from error
    stems = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
    return tuple(sorted(stem for stem in stems if NAME.fullmatch(stem)))


def read_lane(host: Host, name: str) -> Lane:
    """A declared lane.

    Raises:
        ConfigError: no file (``lane-missing``), not to be trusted (``lane-untrusted``),
            unreadable (``lane-unreadable``), or wrong (``InvalidLaneError``).
    """
    if not NAME.fullmatch(name):
        raise _missing(host, name)
    return read_lane_file(host, lane_file(name), name)


def read_lane_file(host: Host, file: str, name: str | None = None) -> Lane:
    """A lane from any file, such as one that is to be put in place.

    Raises:
        ConfigError: as ``read_lane``.
    """
    try:
        path = host.path(file)
        _refuse_untrusted(host, file)
        with path.open("rb") as source:
            content = source.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(host, name or file) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    if len(content) > _MAX_BYTES:
        raise InvalidLaneError(file, [Problem(file, "", f"longer than {_MAX_BYTES} bytes")])
    return parse_lane(content.decode("utf-8", "replace"), file, name)


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
    lane = lane_of(document.data, file)
    if wrong := [Problem(file, f"args.{flag}", why) for flag, why in wrong_numbers(lane)]:
        raise InvalidLaneError(file, wrong)
    if name is not None and lane.name != name:
        said = f"is {lane.name!r}, and the file is called {name}{_SUFFIX}"
        raise InvalidLaneError(file, [Problem(file, "name", said)])
    return lane


def lane_of(values: Any, file: str) -> Lane:
    """A lane from plain values.

    Raises:
        InvalidLaneError: they are none.
    """
    try:
        return lane_adapter().validate_python(values)
    except ValidationError as error:
        found = [
            Problem(file, key_text(_key(detail["loc"])), detail["msg"])
            for detail in error.errors(include_url=False)
        ]
        raise InvalidLaneError(file, found) from error


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
            unknown = [one["loc"] for one in error.errors() if one["type"] in _UNKNOWN]
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


def _key(location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    # pydantic names the members of a union, too: args.x.bool, args.x.str
    if location[:1] == ("args",):
        return location[:2]
    return location


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


def _missing(host: Host, name: str) -> ConfigError:
    names = lane_names(host)
    there = f"there are: {', '.join(names)}" if names else f"there is none in {LANES_DIR} yet"
    return ConfigError(
        f"there is no lane {name}",
        code="lane-missing",
        hint=f"{there}; gpuguard lane init writes one from a preset",
    )


def _unreadable(file: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{file}: cannot be read: {error.strerror or error}",
        code="lane-unreadable",
        hint="run as root" if isinstance(error, PermissionError) else "",
    )
