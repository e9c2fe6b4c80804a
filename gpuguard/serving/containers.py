"""Ask Podman or Docker about a lane: its container, and images of lanes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpuguard.errors import CommandError, GpuguardError
from gpuguard.host import Host
from gpuguard.host.reading import list_dir, read_text
from gpuguard.serving.lane import Lane
from gpuguard.serving.render import env_file

_TOOL_SECONDS = 60.0
#: Where Quadlet looks for lane-NAME.container, and so for what is put on top of it.
_QUADLETS = ("/etc/containers/systemd", "/run/containers/systemd", "/usr/share/containers/systemd")


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of the host that a container sees."""

    source: str
    is_writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A lane's container as its engine describes it, and what of it should be so.

    ``lane_image``: id of the image that the lane's digest names on this machine.
    ``prepared``: the environment that ``lane prepare`` decided for this start.
    ``model``, ``cache``: the folders that it should see, with links followed.
    """

    is_running: bool
    image: str
    lane_image: str
    command: tuple[str, ...]
    environment: dict[str, str]
    mounts: frozenset[Mount]
    prepared: dict[str, str]
    model: str
    cache: str


def tool_of(lane: Lane) -> str | None:
    """The program that knows the lane's container; None: it has none."""
    return {"quadlet": "podman", "compose": "docker"}.get(lane.engine.backend)


def container_name(lane: Lane) -> str:
    """As the files of the lane name it."""
    return f"lane-{lane.name}"


def image_id(host: Host, tool: str, image: str) -> str | None:
    """The id of an image; None: it is not on this machine.

    Raises:
        CommandError: the tool cannot be asked.
    """
    if tool == "podman":
        known = host.run(tool, "image", "exists", image, timeout=_TOOL_SECONDS, ok=(0, 1))
        if known.exit_status != 0:
            return None
    else:
        host.run(tool, "version", timeout=_TOOL_SECONDS)  # a daemon that is down knows no image
    done = host.run(tool, "image", "inspect", image, timeout=_TOOL_SECONDS, ok=None)
    return str(_only(done.stdout).get("Id", "")) if done.exit_status == 0 else None


def image_user(host: Host, tool: str, image: str) -> str:
    """As whom an image runs, in its own words: ``2000:0``, ``vllm``; "" is root.

    Raises:
        CommandError: the tool cannot be asked.
        ValueError, TypeError, AttributeError: it answers in a way not known here.
    """
    done = host.run(tool, "image", "inspect", image, timeout=_TOOL_SECONDS)
    return str((_only(done.stdout).get("Config") or {}).get("User") or "")


def look_at_container(host: Host, lane: Lane, cache: str) -> tuple[Container | None, str | None]:
    """What runs as the lane, or why that cannot be told.

    Args:
        host: where.
        lane: with a container.
        cache: the folder for compiled kernels that was made for it.
    """
    tool = tool_of(lane)
    assert tool is not None  # noqa: S101 - the caller has looked
    try:
        wanted = image_id(host, tool, str(lane.engine.image))
        done = host.run(tool, "container", "inspect", container_name(lane), timeout=_TOOL_SECONDS)
        return _container(host, lane, cache, _only(done.stdout), wanted or ""), None
    except CommandError as error:
        return None, f"{tool} does not tell what runs as {container_name(lane)}: {error.message}"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return None, f"{tool} describes {container_name(lane)} in a way not known here: {error!r}"
    except GpuguardError as error:
        return None, error.message


def _container(host: Host, lane: Lane, cache: str, found: dict[str, Any], wanted: str) -> Container:
    return Container(
        is_running=found["State"]["Running"] is True,
        image=_bare(found["Image"]),
        lane_image=_bare(wanted),
        command=tuple(map(str, found["Config"]["Cmd"] or ())),
        environment=_assignments(found["Config"]["Env"] or ()),
        mounts=frozenset(
            Mount(os.path.realpath(one["Source"]), one["RW"] is True) for one in found["Mounts"]
        ),
        prepared=_assignments((read_text(host, env_file(lane.name)) or "").splitlines()),
        model=os.path.realpath(lane.model.path),
        cache=os.path.realpath(cache),
    )


def _only(text: str) -> dict[str, Any]:
    """The one object of an answer of ``inspect``."""
    (found,) = json.loads(text)
    return dict(found)


def _bare(image: str) -> str:
    return image.removeprefix("sha256:")


def _assignments(lines: Any) -> dict[str, str]:
    return dict(
        line.split("=", 1) for line in map(str, lines) if "=" in line and not line.startswith("#")
    )


def container_drop_ins(host: Host, lane: Lane) -> tuple[str, ...]:
    """Files that Quadlet merges into the lane's own, and systemd therefore does not name."""
    return tuple(_drop_ins(host, lane)) if lane.engine.backend == "quadlet" else ()


def _drop_ins(host: Host, lane: Lane) -> Iterator[str]:
    for place in _QUADLETS:
        for folder in (f"{place}/{container_name(lane)}.container.d", f"{place}/container.d"):
            yield from (
                f"{folder}/{name}" for name in list_dir(host, folder) if name[-5:] == ".conf"
            )
