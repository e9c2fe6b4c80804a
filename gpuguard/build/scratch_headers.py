"""Headers of a kernel that is not installed, in a folder that is laid out like a root.

Packages are downloaded and unpacked there, never installed. Debian's headers name the folder
of their ``-common`` part by an absolute path and link to kbuild's programs by relative ones:
laid out like a root, and asked for by the paths that ``probes.headers`` finds, all of it works.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpuguard.build.staging import remove_stale, remove_tree
from gpuguard.core.facts import HeadersFacts
from gpuguard.errors import CommandError, PreflightError
from gpuguard.host import Host, LocalHost
from gpuguard.host.signals import HeldSignals
from gpuguard.probes import apt
from gpuguard.probes.headers import headers_fingerprint, probe_headers
from gpuguard.state import CACHE_DIR

_UNPACK_SECONDS = 300.0
_QUERY_SECONDS = 60.0
SCRATCH_DIR = f"{CACHE_DIR}/scratch"
#: Of what a headers package depends on; compilers and libraries have to be installed.
_PARTS = ("linux-headers-", "linux-kbuild-")
_INCLUDE = re.compile(r"^include .*/(linux-headers-[^/]+)/Makefile$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Scratch:
    """A folder of root's own; ``inside`` is its path inside the host."""

    path: Path
    inside: str


@contextmanager
def scratch_folder(host: Host) -> Iterator[Scratch]:
    """A fresh folder that everybody may read; gone when the context ends, or at the next start."""
    parent = host.make_dir(SCRATCH_DIR)
    remove_stale(parent)
    with HeldSignals() as held:
        path = Path(tempfile.mkdtemp(dir=parent))
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            held.let_go()
            fcntl.flock(lock, fcntl.LOCK_EX)
            path.chmod(0o755)
            yield Scratch(path, host.inside(path))
        finally:
            with HeldSignals():
                remove_tree(path)
                os.close(lock)


def scratch_headers(
    host: Host,
    scratch: Scratch,
    release: str,
    versions: Mapping[str, str],
    say: Callable[[str], None] = lambda _: None,
) -> HeadersFacts:
    """Lay out the headers of one release as they will be once ``versions`` are installed.

    Args:
        host: whose apt is asked, and whose installed headers packages are used as they are.
        scratch: where; several releases may share it.
        release: the kernel.
        versions: package -> version, of what is going to be installed.
        say: told each download, one line.

    Raises:
        PreflightError: a package is not to be had, or cannot be used.
    """
    for package, version in closure(host, f"linux-headers-{release}", versions):
        if stamp(scratch.path, package) == version:
            continue
        if package in versions:
            say(f"{package} {version}")
            move_in(scratch.path, unpack(host, scratch, package, version))
        else:
            _copy_installed(host, scratch.path, package)
        set_stamp(scratch.path, package, version)
    link_build(scratch.path, release)
    check_build_tools(scratch.path, release)
    place = LocalHost(scratch.path)
    found = probe_headers(place, release, {})
    fingerprint = headers_fingerprint(place, found)
    return replace(
        found,
        build_dir=f"{scratch.inside}{found.build_dir}",
        source_dir=f"{scratch.inside}{found.source_dir}",
        fingerprint=fingerprint,
        package_version=versions.get(found.package or ""),
    )


def closure(
    host: Host, package: str, versions: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """The package and what it needs of headers and kbuild's programs: (name, version).

    Raises:
        PreflightError: ``headers-unavailable``.
    """
    known = versions or {}
    todo, seen = [package], {package}
    while todo:
        name = todo.pop()
        asked = f"{name}={known[name]}" if name in known else name
        fields = apt.show(host, [asked]).get(name, {})
        if "Version" not in fields:
            raise PreflightError(
                f"apt knows no package {asked}", hint=apt.UPDATE_HINT, code="headers-unavailable"
            )
        yield name, fields["Version"]
        for alternatives in fields.get("Depends", "").split(","):
            needed = alternatives.split("|")[0].split()
            if needed and needed[0].startswith(_PARTS) and needed[0] not in seen:
                seen.add(needed[0])
                todo.append(needed[0])


def unpack(host: Host, scratch: Scratch, package: str, version: str) -> Path:
    """Download a package and unpack it into a folder of its own below the scratch folder.

    Raises:
        PreflightError: ``headers-download``.
    """
    archive = apt.download(host, package, version, scratch.inside)
    unpacked = scratch.path / f".{package}"
    host.run("dpkg-deb", "-x", str(archive), str(unpacked), timeout=_UNPACK_SECONDS)
    archive.unlink()
    return unpacked


def move_in(root: Path, unpacked: Path) -> None:
    """Rename each folder of a package into its place, so that none is ever half there."""
    for parent in ("usr/src", "usr/lib"):
        for entry in sorted((unpacked / parent).glob("linux-*")):
            target = root / parent / entry.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_symlink() or target.exists():  # an older version of the package
                target.rename(unpacked / f"old-{entry.name}")
            entry.rename(target)
    shutil.rmtree(unpacked)


def link_build(root: Path, release: str) -> None:
    """``/lib/modules/R/build`` and ``source``, as the packages of an installed kernel have it."""
    modules = root / "lib" / "modules" / release
    modules.mkdir(parents=True, exist_ok=True)
    _link(modules / "source", f"/{source_dir(root, release)}")
    _link(modules / "build", f"/usr/src/linux-headers-{release}")


def source_dir(root: Path, release: str) -> str:
    """The kernel's source tree as a path inside ``root``: what SYSSRC must be."""
    own = f"usr/src/linux-headers-{release}"
    makefile = (root / own / "Makefile").read_text(errors="replace")
    match = _INCLUDE.search(makefile)
    return f"usr/src/{match[1]}" if match else own


def stamp(root: Path, package: str) -> str | None:
    """Which version of a package was unpacked into a folder."""
    file = root / "packages" / package
    return file.read_text().strip() if file.exists() else None


def set_stamp(root: Path, package: str, version: str) -> None:
    """Note which version a folder has; after it is whole."""
    file = root / "packages" / package
    file.parent.mkdir(exist_ok=True)
    file.write_text(version + "\n")


def check_build_tools(root: Path, release: str) -> None:
    """Kbuild's own programs come unpacked, not installed: nobody has looked at what they need.

    Raises:
        PreflightError: ``kbuild-libraries`` or ``kbuild-programs``.
    """
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
    if not there:
        return []
    printed = LocalHost().run("ldd", *there, timeout=_QUERY_SECONDS, ok=None).stdout
    return sorted(set(re.findall(r"(\S+) => not found", printed)))


def _copy_installed(host: Host, root: Path, package: str) -> None:
    """Hard links to what is installed already: nothing here is ever written in place."""
    for parent in ("usr/src", "usr/lib"):
        source, target = host.path(f"/{parent}/{package}"), root / parent / package
        if not source.is_dir():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            host.run("cp", "-al", str(source), str(target), timeout=_UNPACK_SECONDS)
        except CommandError:  # another file system
            shutil.rmtree(target, ignore_errors=True)
            host.run("cp", "-a", str(source), str(target), timeout=_UNPACK_SECONDS)


def _link(link: Path, target: str) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)
