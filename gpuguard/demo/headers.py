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

from gpuguard.core.releases import release_key
from gpuguard.errors import CommandError, CommandNotFoundError, PreflightError
from gpuguard.host import LocalHost

_QUERY_SECONDS = 60.0
_DOWNLOAD_SECONDS = 600.0
_UNPACK_SECONDS = 300.0
_UPDATE_HINT = "run `apt-get update` as root, and check that the package archive can be reached"

# 6.1.0-47-amd64, 6.12.107+deb12-amd64, 6.8.0-90-generic; not 6.1.0-47-rt-amd64, not -cloud-,
# not 6.12-amd64 (a meta-package)
_PACKAGE = re.compile(r"linux-headers-(\d+\.\d+\.\d+(?:\+[^-]+)?(?:-\d+)?-(?:amd64|generic))")
_META_PACKAGES = ("linux-headers-amd64", "linux-headers-generic")
_PARTS = ("linux-headers-", "linux-kbuild-")  # of what a headers package depends on
_INCLUDE = re.compile(r"^include .*/(linux-headers-[^/]+)/Makefile$", re.MULTILINE)


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
                hint=_UPDATE_HINT,
                code="headers-unavailable",
            )
        for release in wanted:
            if release not in cached_releases(root):
                say(f"downloading the headers of {release}")
                _fetch(root, release)
    _check_build_tools(root, wanted)
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


def source_dir(root: Path, release: str) -> str:
    """The kernel's source tree as a path inside ``root``: what SYSSRC must be."""
    own = f"usr/src/linux-headers-{release}"
    makefile = (root / own / "Makefile").read_text(errors="replace")
    match = _INCLUDE.search(makefile)
    return f"usr/src/{match[1]}" if match else own


def package_version(root: Path, package: str) -> str | None:
    """Which version of a package was unpacked into a cache."""
    stamp = root / "packages" / package
    return stamp.read_text().strip() if stamp.exists() else None


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
    with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as work:
        for package, version in _closure(f"linux-headers-{release}"):
            if package_version(root, package) != version:
                unpacked = _download(Path(work), package, version)
                _move_in(root, unpacked)
                _stamp(root, package, version)
    modules = root / "lib" / "modules" / release
    modules.mkdir(parents=True, exist_ok=True)
    _link(modules / "source", f"/{source_dir(root, release)}")
    _link(modules / "build", f"/usr/src/linux-headers-{release}")


def _closure(package: str) -> Iterator[tuple[str, str]]:
    """The package and what it needs of headers and kbuild's programs: (name, version)."""
    todo, seen = [package], {package}
    while todo:
        name = todo.pop()
        fields = _candidate(name)
        yield name, fields["Version"]
        for alternatives in fields.get("Depends", "").split(","):
            needed = alternatives.split("|")[0].split()
            if needed and needed[0].startswith(_PARTS) and needed[0] not in seen:
                seen.add(needed[0])
                todo.append(needed[0])


def _candidate(package: str) -> dict[str, str]:
    """The control fields of the version that apt would install."""
    shown = LocalHost().run(
        "apt-cache", "show", "--no-all-versions", package, timeout=_QUERY_SECONDS, ok=None
    )
    fields = dict(re.findall(r"^(\w[\w-]*): (.*)$", shown.stdout, re.MULTILINE))
    if "Version" not in fields:
        raise PreflightError(
            f"apt knows no package {package}", hint=_UPDATE_HINT, code="headers-unavailable"
        )
    return fields


def _download(work: Path, package: str, version: str) -> Path:
    host = LocalHost()
    proxies = {name: value for name, value in os.environ.items() if name.endswith("_proxy")}
    try:
        host.run(
            "apt-get", "download", "-q", f"{package}={version}",
            cwd=work, env=proxies, timeout=_DOWNLOAD_SECONDS,
        )  # fmt: skip
    except CommandNotFoundError:
        raise
    except CommandError as error:
        raise PreflightError(
            f"{package} {version} cannot be downloaded",
            hint=_UPDATE_HINT,
            code="headers-download",
            detail=error.detail,
        ) from error
    archive = next(work.glob(f"{package}_*.deb"))
    unpacked = work / package
    host.run("dpkg-deb", "-x", str(archive), str(unpacked), timeout=_UNPACK_SECONDS)
    archive.unlink()
    return unpacked


def _move_in(root: Path, unpacked: Path) -> None:
    """Rename each folder of a package into the cache, so that none is ever half there."""
    for parent in ("usr/src", "usr/lib"):
        for entry in sorted((unpacked / parent).glob("linux-*")):
            _drop_other_architectures(entry)
            target = root / parent / entry.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_symlink() or target.exists():  # an older version of the package
                target.rename(unpacked / f"old-{entry.name}")
            entry.rename(target)


def _drop_other_architectures(headers: Path) -> None:
    """A third of the files, which a build for x86 never reads, but each tree would carry."""
    if (headers / "arch").is_symlink():
        return
    for folder in headers.glob("arch/*"):
        if folder.is_dir() and not folder.is_symlink() and folder.name != "x86":
            shutil.rmtree(folder)


def _stamp(root: Path, package: str, version: str) -> None:
    stamp = root / "packages" / package
    stamp.parent.mkdir(exist_ok=True)
    stamp.write_text(version + "\n")


def _link(link: Path, target: str) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def _check_build_tools(root: Path, releases: Sequence[str]) -> None:
    """Kbuild's own programs come unpacked, not installed: nobody has looked at what they need."""
    for release in releases:
        headers = root / "usr/src" / f"linux-headers-{release}"
        if missing := _missing_libraries((headers / "scripts").resolve()):
            raise PreflightError(
                f"kbuild's programs for {release} need {', '.join(missing)}",
                hint="install the packages that provide them, e.g. libelf1",
                code="kbuild-libraries",
            )
        # Debian's headers carry type information since 6.12, and kbuild then adds it to modules
        if (headers / "vmlinux").exists() and not LocalHost().has_program("pahole"):
            raise PreflightError(
                f"modules for {release} cannot be finished without pahole",
                hint="apt-get install pahole",
                code="kbuild-programs",
            )


def _missing_libraries(scripts: Path) -> list[str]:
    programs = (scripts / "mod/modpost", scripts.parent / "tools/objtool/objtool")
    there = [str(program) for program in programs if program.exists()]
    printed = LocalHost().run("ldd", *there, timeout=_QUERY_SECONDS, ok=None).stdout
    return sorted(set(re.findall(r"(\S+) => not found", printed)))
