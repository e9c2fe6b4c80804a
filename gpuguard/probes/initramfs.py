"""Does the initial RAM disk carry the NVIDIA modules that resolve now: look inside it.

Neither time stamps nor ``lsinitramfs`` tell: an image may be newer than the module and hold
the old one (CASES C21). What is inside is identified by build-id, as on disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gpuguard.core.facts import InitramfsFacts, InitramfsState
from gpuguard.errors import ProbeError
from gpuguard.host.cpio import Member, is_archive, members
from gpuguard.host.decompress import compression_of, decompressed, path_of, temporary_file
from gpuguard.host.elf import read_module
from gpuguard.host.port import Host
from gpuguard.host.reading import absent_is_none, real_path
from gpuguard.probes.modules import base_name, canonical_name
from gpuguard.probes.unified import initrd_inside, is_unified

#: initramfs-tools and Debian's dracut; dracut and mkinitcpio elsewhere.
_IMAGES = ("/boot/initrd.img-{}", "/boot/initramfs-{}.img")
_MODULE_PATH = re.compile(r"(?:\.?/)?(?:usr/)?lib/modules/([^/]+)/(?:.*/)?([^/]+)")

Found = tuple[tuple[str, str | None], ...]


class Cache(Protocol):
    """Remembers a value for a file as long as it is the same file (``host.cache``)."""

    def get(self, path: Path) -> dict[str, Any] | None:
        """The value put for this very file, or None."""

    def put(self, path: Path, value: dict[str, Any]) -> None:
        """Remember a value for this file as it is now."""


def image_of(host: Host, release: str) -> str | None:
    """Path of the image of a release inside the host, None if there is none.

    Raises:
        ProbeError: ``/boot`` cannot be searched.
    """
    names = (name.format(release) for name in _IMAGES)
    return next((name for name in names if real_path(host, name) is not None), None)


def probe_initramfs(
    host: Host,
    release: str,
    resolved: Mapping[str, str | None],
    cache: Cache | None = None,
    *,
    loaded: Sequence[str] | None = None,
) -> InitramfsFacts:
    """State of one release's image against what modprobe would load.

    Args:
        host: where to look.
        release: kernel release.
        resolved: base name of each module file that resolves -> its build-id.
        cache: saves decompressing an image that has not changed (0.1 to 2 s each).
        loaded: what the boot loader loads with this kernel, of ``NextKernel``; None: what lies
            at the usual place.

    What cannot be read is UNKNOWN, with the reason.
    """
    image = unified = None
    found: list[tuple[str, str | None]] = []
    try:
        images = _images(host, release, loaded)
        if not images:
            return InitramfsFacts(state=InitramfsState.NONE, reason="there is no image")
        for image in images:
            unified = image if _is_unified(host, image) else None
            found += _cached_modules(host, image, release, cache)
    except (ProbeError, FileNotFoundError) as error:  # not found: it went away meanwhile
        return InitramfsFacts(
            state=InitramfsState.UNKNOWN, path=image, unified=unified, reason=str(error)
        )
    state, reason = _compare(tuple(found), resolved)
    return InitramfsFacts(
        state=state,
        path=None if unified else image,
        unified=unified,
        modules=tuple(found),
        reason=reason,
    )


def _images(host: Host, release: str, loaded: Sequence[str] | None) -> list[str]:
    """The usual image, unless the loader names others."""
    usual = image_of(host, release)
    if loaded is None:
        return [usual] if usual else []
    absent = [path for path in loaded if real_path(host, path) is None]
    # A name of ours that is not there: the image was not made (yet), there or elsewhere.
    names = {Path(name.format(release)).name for name in _IMAGES}
    if usual is None and {Path(path).name for path in absent} <= names:
        return [path for path in loaded if path not in absent]
    if absent:
        raise ProbeError(f"the boot loader names {absent[0]}, and no such file is found")
    same = usual is not None and [real_path(host, p) for p in loaded] == [real_path(host, usual)]
    return [usual] if usual and same else list(loaded)


def _is_unified(host: Host, image: str) -> bool:
    with absent_is_none(image):
        return is_unified(host.path(image))


def modules_inside(host: Host, image: str, release: str) -> Found:
    """(base name, build-id) of each NVIDIA module for this release in an image, sorted.

    Raises:
        ProbeError: the image, or an NVIDIA module in it, cannot be read.
    """
    path = host.path(image)
    if _is_unified(host, image):
        with initrd_inside(path, image) as inside:
            return _modules_in(host, inside, image, release) if inside is not None else ()
    return _modules_in(host, path, image, release)


def _modules_in(host: Host, path: Path, image: str, release: str) -> Found:
    found: dict[str, tuple[str, str | None]] = {}
    for member in _all_members(host, path, image):
        match = _MODULE_PATH.fullmatch(member.name)
        if match is None or match[1] != release or not member.is_file:
            continue
        if canonical_name(match[2]) is not None:
            # Unpacked in order, so that the last one of a name is the one that stays.
            found[member.name] = (base_name(match[2]), _build_id(host, member, image))
    return tuple(sorted(found.values(), key=lambda pair: (pair[0], pair[1] or "")))


def _cached_modules(host: Host, image: str, release: str, cache: Cache | None) -> Found:
    if cache is None:
        return modules_inside(host, image, release)
    real = host.path(image)
    key = f"initramfs {release}"  # one image may serve two kernels
    with absent_is_none(image):
        known = cache.get(real) or {}
        if key not in known:
            known = {**known, key: [list(p) for p in modules_inside(host, image, release)]}
            cache.put(real, known)
    return tuple((str(name), build_id) for name, build_id in known[key])


def _compare(found: Found, resolved: Mapping[str, str | None]) -> tuple[InitramfsState, str]:
    if not found:
        return InitramfsState.NONE, "carries no NVIDIA modules"
    for name, build_id in found:
        if build_id is None:
            return InitramfsState.STALE, f"{name} inside has no build-id"
        if name not in resolved:
            return InitramfsState.STALE, f"{name} is inside, and no such file resolves"
        if resolved[name] != build_id:
            return InitramfsState.STALE, f"{name} inside is another build ({build_id})"
    return InitramfsState.CURRENT, ""


def _all_members(host: Host, path: Path, image: str) -> Iterator[Member]:
    """Members of every archive of an image: plain ones first (microcode), then one compressed.

    A compressed archive reaches to the end: where it stops is known to its decoder only, and
    initramfs-tools and dracut write one, last.
    """
    with absent_is_none(image), path.open("rb") as file:
        if is_archive(file):
            yield from members(file)
        offset = file.tell()
        head = file.read(8)
    if not head:
        if offset == 0:
            raise ProbeError(f"{image} is empty")
        return
    if compression_of(head) is None:
        raise ProbeError(f"{image} is neither a cpio archive nor compressed at byte {offset}")
    with decompressed(host, path, offset=offset) as inner:
        yield from members(inner)


def _build_id(host: Host, member: Member, image: str) -> str | None:
    try:
        with temporary_file() as copy:
            member.copy_to(copy)
            copy.flush()
            with decompressed(host, path_of(copy)) as module:
                return read_module(module).build_id
    except (ProbeError, OSError) as error:
        raise ProbeError(f"{image}: {member.name} inside cannot be read: {error}") from error
