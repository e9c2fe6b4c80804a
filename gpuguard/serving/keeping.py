"""Keep the images of lanes that may be needed from ``prune``, and see when one is gone.

Podman and Docker take away each image that nothing uses; a lane that does not run uses none. Podman
gets a volume of its image driver, which holds without a container: ``podman image prune -a``,
``podman system prune -a`` and ``podman image rm`` leave its image alone. Docker has no such thing:
a container that is made and never started holds against ``docker image prune -a``, and
``docker system prune`` removes it first. Nothing is written down elsewhere: what is kept is seen by
name, and whoever comes after a crash makes what lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from gpuguard.errors import CommandError, ConfigError, GpuguardError, StateError
from gpuguard.host import Host
from gpuguard.serving import store
from gpuguard.serving.containers import image_id, tool_of
from gpuguard.serving.lane import Lane
from gpuguard.serving.lane_file import read_lane

_PREFIX = "gpuguard-keep-"
_SHORT = 16  # of the digest
_TOOL_SECONDS = 60.0
_Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Holder:
    """How one tool holds an image."""

    known: _Words
    make: Callable[[str, str], _Words]  # name, image
    drop: _Words


_HOLDERS = {
    "podman": _Holder(
        ("volume", "ls", "-q", "--filter", f"name={_PREFIX}"),
        lambda name, image: (
            "volume", "create", "--driver=image", f"--opt=image={image}", name,
        ),
        ("volume", "rm"),
    ),
    "docker": _Holder(
        ("container", "ls", "-a", "--format={{.Names}}", "--filter", f"name={_PREFIX}"),
        lambda name, image: ("container", "create", "--network=none", f"--name={name}", image),
        ("container", "rm"),
    ),
}  # fmt: skip


def keeper(image: str) -> str:
    """What holds an image is called so, after its digest."""
    return f"{_PREFIX}{image.rpartition(':')[2][:_SHORT]}"


def lanes_to_keep(host: Host) -> tuple[Lane, ...]:
    """The active lane, the one that a rollback goes to, and the fallbacks of the active one.

    Raises:
        ProbeError, StateError: what is recorded cannot be read.
    """
    active = store.read_active(host)
    found: dict[str, Lane] = {}
    for lane_id in (active.lane_id, active.rollback_target):
        with suppress(StateError):  # lane status tells that its record is gone
            if lane_id is not None:
                found[lane_id] = store.read_release(host, lane_id).lane
    for name in [name for lane in found.values() for name in lane.fallback]:
        with suppress(StateError, ConfigError):
            promoted = store.find_release(host, name)
            lane = (
                read_lane(host, name)
                if promoted is None
                else store.read_release(host, promoted).lane
            )
            found.setdefault(lane.lane_id, lane)
    return tuple(found.values())


def keep_images(host: Host, lanes: Iterable[Lane], *, drop_others: bool) -> tuple[str, ...]:
    """Hold the images of these lanes; what could not be done.

    Args:
        host: where.
        lanes: with or without images.
        drop_others: let go of images that none of them needs.
    """
    wanted: dict[str, dict[str, str]] = {tool: {} for tool in _HOLDERS}
    for lane in lanes:
        if (tool := tool_of(lane)) is not None:
            wanted[tool][keeper(str(lane.engine.image))] = str(lane.engine.image)
    return tuple(
        note
        for tool, images in wanted.items()
        if images or (drop_others and host.has_program(tool))
        for note in _hold(host, tool, images, drop_others=drop_others)
    )


def _hold(host: Host, tool: str, images: dict[str, str], *, drop_others: bool) -> Iterator[str]:
    holder = _HOLDERS[tool]
    try:
        said = host.run(tool, *holder.known, timeout=_TOOL_SECONDS).stdout.split()
    except CommandError as error:
        if images:  # else there is nothing of ours, as far as anybody knows
            yield f"images of lanes are not kept from prune: {error.message}"
        return
    known = {name for name in said if name.startswith(_PREFIX)}  # the filter is no prefix
    for name, image in images.items():
        if name not in known:
            try:
                host.run(tool, *holder.make(name, image), timeout=_TOOL_SECONDS)
            except CommandError as error:
                yield f"image {image} is not kept from prune: {error.message}"
    for name in sorted(known - set(images)) if drop_others else ():
        try:
            host.run(tool, *holder.drop, name, timeout=_TOOL_SECONDS)
        except CommandError as error:
            yield f"{name} still keeps an image that no lane needs: {error.message}"


def missing_images(host: Host) -> Iterator[tuple[Lane, str | None]]:
    """Lanes whose image is gone; with why, where that cannot be looked at.

    Raises:
        ProbeError, StateError: what is recorded cannot be read.
    """
    for lane in lanes_to_keep(host):
        if (tool := tool_of(lane)) is None:
            continue
        try:
            if image_id(host, tool, str(lane.engine.image)) is None:
                yield lane, None
        except GpuguardError as error:
            yield lane, error.message
