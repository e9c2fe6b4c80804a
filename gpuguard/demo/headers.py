"""Real kernels' headers from the distribution's archive, without installing anything.

The packages are downloaded with ``apt-get download`` and unpacked with ``dpkg-deb -x`` into
a cache folder that is laid out like the root of a machine; an ordinary user may do both.
Out of scope: sources of packages other than apt's, compilers.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuguard.build.scratch_headers import (
    Scratch,
    check_build_tools,
    closure,
    link_build,
    move_in,
    set_stamp,
    source_dir,
    stamp,
    unpack,
)
from gpuguard.core.releases import release_key
from gpuguard.errors import PreflightError
from gpuguard.host import LocalHost
from gpuguard.probes import apt

_QUERY_SECONDS = 60.0

# 6.1.0-47-amd64, 6.12.107+deb12-amd64, 6.8.0-90-generic; not 6.1.0-47-rt-amd64, not -cloud-,
# not 6.12-amd64 (a meta-package)
_PACKAGE = re.compile(r"linux-headers-(\d+\.\d+\.\d+(?:\+[^-]+)?(?:-\d+)?-(?:amd64|generic))")
_META_PACKAGES = ("linux-headers-amd64", "linux-headers-generic")
_INCLUDE = re.compile(r"^include .*/(linux-headers-[^/]+)/Makefile$", re.MULTILINE)


__all__ = ["HeadersCache", "get_headers", "header_paths", "package_version", "source_dir"]


@dataclass(frozen=True, slots=True)
class HeadersCache:
    """Unpacked headers.

    ``root`` holds ``usr/src/linux-headers-*``, ``usr/lib/linux-kbuild-*`` and
    ``lib/modules/R/build`` links, as the packages lay them out. ``releases`` are those that
    were asked for, oldest first; the folder may hold more.
    """

    root: Path
    releases: tuple[str, ...]


def default_cache() -> Path:
    """``~/.cache/gpuguard/headers``, or below XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpuguard" / "headers"


def get_headers(
    cache: Path | None = None,
    *,
    releases: Sequence[str] = (),
    count: int = 2,
    say: Callable[[str], None] = lambda _: None,
) -> HeadersCache:
    """Headers of the given releases, or of ``count`` that belong together; fetched if need be.

    What the cache holds already is used as it is, without asking apt.

    Args:
        cache: folder to keep them in; default ``default_cache()``.
        releases: exactly these; empty: the newest ``count`` of one series, by preference
            the series that the distribution's own meta-package follows.
        count: how many, if ``releases`` is empty.
        say: told each step, one line.

    Raises:
        PreflightError: no such packages, no network, or an unusable package.
    """
    root = default_cache() if cache is None else cache
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        wanted = (
            tuple(releases) or _choose_cached(root, count) or available_releases(count)[-count:]
        )
        if len(wanted) < (len(releases) or count):
            raise PreflightError(
                f"apt offers no {count} kernels of one series with headers",
                hint=apt.UPDATE_HINT,
                code="headers-unavailable",
            )
        for release in wanted:
            if release not in cached_releases(root):
                say(f"downloading the headers of {release}")
                _fetch(root, release)
    for release in wanted:
        check_build_tools(root, release)
    return HeadersCache(root, tuple(sorted(wanted, key=release_key)))


def cached_releases(root: Path) -> tuple[str, ...]:
    """What a cache holds complete, oldest first."""
    folders = root.glob("lib/modules/*")
    # The link is made last. It is absolute, so it dangles here and glob() would not see it.
    found = (folder.name for folder in folders if (folder / "build").is_symlink())
    return tuple(sorted(found, key=release_key))


def available_releases(count: int = 2) -> tuple[str, ...]:
    """Kernels of one series whose headers apt offers, oldest first; empty: fewer than ``count``."""
    host = LocalHost()
    names = host.run("apt-cache", "pkgnames", "linux-headers-", timeout=_QUERY_SECONDS).stdout
    meta = host.run(
        "apt-cache", "depends", *_META_PACKAGES, timeout=_QUERY_SECONDS, ok=None
    ).stdout  # status 100 where one of the two is unknown: Debian or Ubuntu
    return choose_series(names.split(), _PACKAGE.findall(meta), count)


def choose_series(packages: Iterable[str], preferred: Sequence[str], count: int) -> tuple[str, ...]:
    """The releases of the best series that has at least ``count``, oldest first.

    The series of a ``preferred`` release comes first, then the newest. A series is what
    shares the first two numbers and the flavour: 6.1 amd64.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for package in packages:
        if match := _PACKAGE.fullmatch(package):
            groups.setdefault(_series(match[1]), []).append(match[1])
    enough = [sorted(set(group), key=release_key) for group in groups.values()]
    enough = [group for group in enough if len(group) >= count]
    liked = {_series(release) for release in preferred}
    enough.sort(key=lambda group: (_series(group[0]) in liked, release_key(group[-1])))
    return tuple(enough[-1]) if enough else ()


def header_paths(root: Path, release: str) -> tuple[str, ...]:
    """Folders and links below ``root`` that a build for one release reads, as relative paths.

    Debian: the release's own folder, the ``-common`` one, and kbuild's programs, to which
    both link; Ubuntu: two folders that link to each other.
    """
    found = {f"usr/src/linux-headers-{release}"}
    todo = list(found)
    while todo:
        for other in _siblings(root, root / todo.pop()):
            if other not in found:
                found.add(other)
                todo.append(other)
    return tuple(sorted(found))


def package_version(root: Path, package: str) -> str | None:
    """Which version of a package was unpacked into a cache."""
    return stamp(root, package)


def _series(release: str) -> tuple[str, str]:
    return ".".join(release.split(".")[:2]), release.rsplit("-", 1)[-1]


def _choose_cached(root: Path, count: int) -> tuple[str, ...]:
    names = [f"linux-headers-{release}" for release in cached_releases(root)]
    return choose_series(names, (), count)[-count:]


def _siblings(root: Path, folder: Path) -> Iterator[str]:
    """Top-level folders that the links and the Makefile of one headers folder lead to."""
    if not folder.is_dir():
        return
    makefile = folder / "Makefile"
    if makefile.exists() and (match := _INCLUDE.search(makefile.read_text(errors="replace"))):
        yield f"usr/src/{match[1]}"
    for link in (entry for entry in folder.iterdir() if entry.is_symlink()):
        inside = os.path.normpath(folder.relative_to(root) / link.readlink()).split("/")
        if inside[:2] in (["usr", "src"], ["usr", "lib"]) and len(inside) > 2:  # noqa: PLR2004
            yield "/".join(inside[:3])


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(root: Path, release: str) -> None:
    host = LocalHost()
    with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as work:
        for package, version in closure(host, f"linux-headers-{release}"):
            if stamp(root, package) != version:
                unpacked = unpack(host, Scratch(Path(work), work), package, version)
                for headers in (unpacked / "usr/src").glob("linux-*"):
                    _drop_other_architectures(headers)
                move_in(root, unpacked)
                set_stamp(root, package, version)
    link_build(root, release)


def _drop_other_architectures(headers: Path) -> None:
    """A third of the files, which a build for x86 never reads, but each tree would carry."""
    if (headers / "arch").is_symlink():
        return
    for folder in headers.glob("arch/*"):
        if folder.is_dir() and not folder.is_symlink() and folder.name != "x86":
            shutil.rmtree(folder)
