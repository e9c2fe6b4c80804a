"""Can external modules be compiled for a kernel: what ``/lib/modules/R/build`` leads to.

Debian splits headers in two: an output tree (``linux-headers-R``) whose Makefile includes
the source tree (``linux-headers-…-common``). Ubuntu's ``linux-headers-R-generic`` is one
tree of links into ``linux-headers-R``. Both cases are told by the files, not by the name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from gpuguard.core.facts import HeadersFacts, HeadersState
from gpuguard.core.packages import Package
from gpuguard.errors import ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import read_bytes, real_path
from gpuguard.probes.dpkg import read_packages

_UTS_RELEASE_FILE = "include/generated/utsrelease.h"
#: What kbuild needs for an external module; without modpost or fixdep it cannot even start.
_NEEDED = (
    "Makefile",
    ".config",
    "Module.symvers",
    "include/config/auto.conf",
    "include/generated/autoconf.h",
    _UTS_RELEASE_FILE,
    "scripts/basic/fixdep",
    "scripts/mod/modpost",
)
_UTS_RELEASE = re.compile(rb'^#define UTS_RELEASE "([^"]+)"', re.MULTILINE)
#: Debian 12: ``include /usr/src/linux-headers-6.1.0-47-common/Makefile``; mkmakefile: ``-C``.
_SOURCE_TREE = re.compile(rb"^include\s+(/\S+)/Makefile\s*$|\s-C\s+(/\S+)\s", re.MULTILINE)
_ARCHITECTURES = {
    "CONFIG_X86_64": "x86_64",
    "CONFIG_ARM64": "arm64",
    "CONFIG_PPC64": "powerpc",
    "CONFIG_RISCV": "riscv",
}
_CHUNK = 1 << 20


def probe_headers(
    host: Host,
    release: str,
    packages: Mapping[str, Package] | None = None,
    *,
    fingerprint: bool = False,
) -> HeadersFacts:
    """What there is to compile against for one release.

    Args:
        host: where to look.
        release: kernel release.
        packages: of ``read_packages``, read once for all kernels; None reads it here.
        fingerprint: also hash, which costs 2 MB of reading; see ``headers_fingerprint``.

    A tree that cannot be read is INCOMPLETE, with the reason in ``missing``.
    """
    name = f"linux-headers-{release}"
    known = read_packages(host) if packages is None else packages
    package = known.get(name)
    version = package.version if package and package.is_installed else None
    try:
        facts = _probe_tree(host, release)
        if fingerprint and facts.state is HeadersState.PRESENT:
            facts = replace(facts, fingerprint=headers_fingerprint(host, facts))
    except (ProbeError, OSError) as error:
        facts = HeadersFacts(state=HeadersState.INCOMPLETE, missing=(str(error),))
    return replace(facts, package=name, package_version=version)


def headers_fingerprint(host: Host, facts: HeadersFacts) -> str:
    """SHA-256 over Module.symvers and .config: a module built against others may not load.

    Raises:
        ProbeError: there is no complete tree, or it cannot be read.
    """
    if facts.build_dir is None:
        raise ProbeError("there are no kernel headers to take a fingerprint of")
    digest = hashlib.sha256()
    for name in ("Module.symvers", ".config"):
        for chunk in _chunks(host.path(f"{facts.build_dir}/{name}")):
            digest.update(chunk)
        digest.update(b"\0")  # so that content cannot move from one file to the other
    return digest.hexdigest()


def parse_kernel_config(config: bytes) -> dict[str, str]:
    """The lines of a ``.config`` (260 kB) that matter here, values without quotation marks.

    Keys: CONFIG_CC_VERSION_TEXT, CONFIG_MODULE_SIG, CONFIG_MODULE_SIG_HASH and the
    architecture's own; searched, not split: 0.2 ms instead of 8 ms.
    """
    found = {}
    text = b"\n" + config
    for key in (
        "CONFIG_CC_VERSION_TEXT", "CONFIG_MODULE_SIG", "CONFIG_MODULE_SIG_HASH", *_ARCHITECTURES
    ):  # fmt: skip
        at = text.find(f"\n{key}=".encode())
        if at >= 0:
            end = text.find(b"\n", at + 1)
            line = text[at + 1 : end if end >= 0 else None]
            found[key] = line.partition(b"=")[2].decode("utf-8", "replace").strip().strip('"')
    return found


def _probe_tree(host: Host, release: str) -> HeadersFacts:
    link = f"/lib/modules/{release}/build"
    tree = real_path(host, link)
    if tree is None or not tree.is_dir():
        return HeadersFacts(state=HeadersState.MISSING, missing=(_why_missing(host, link),))
    build_dir = host.inside(tree)
    missing = [name for name in _NEEDED if real_path(host, f"{build_dir}/{name}") is None]
    source_dir, source_problem = _source_dir(host, release, build_dir)
    states = _release_of(host, build_dir)
    if states != release and _UTS_RELEASE_FILE not in missing:
        missing.append(f"it is for {states or 'no release'}, not for {release}")
    if source_problem:
        missing.append(source_problem)
    config = parse_kernel_config(read_bytes(host, f"{build_dir}/.config") or b"")
    return HeadersFacts(
        state=HeadersState.INCOMPLETE if missing else HeadersState.PRESENT,
        build_dir=build_dir,
        source_dir=source_dir,
        missing=tuple(missing),
        compiler=config.get("CONFIG_CC_VERSION_TEXT"),
        architecture=next((a for k, a in _ARCHITECTURES.items() if config.get(k) == "y"), None),
        release=states,
        module_signing=config.get("CONFIG_MODULE_SIG") == "y",
        signature_hash=config.get("CONFIG_MODULE_SIG_HASH", "sha256"),
    )


def _why_missing(host: Host, link: str) -> str:
    path = host.path(link, follow=False)
    if path.is_symlink():
        return f"{link} leads to {path.readlink()}, which is not there"
    return f"{link} is not there"


def _source_dir(host: Host, release: str, build_dir: str) -> tuple[str, str]:
    """The source tree, and what is wrong with it."""
    makefile = read_bytes(host, f"{build_dir}/Makefile") or b""
    # The top Makefile of a single tree has 70 kB and includes by variable only.
    match = _SOURCE_TREE.search(makefile[:4096])
    if match is None:
        source = real_path(host, f"/lib/modules/{release}/source")
        apart = source is not None and (source / "Makefile").exists()
        return (host.inside(source) if source and apart else build_dir), ""
    named = (match[1] or match[2]).decode("utf-8", "replace")
    source = real_path(host, named)
    if source is None or real_path(host, f"{named}/Makefile") is None:
        return named, f"{named} (source tree, named by the Makefile)"
    return host.inside(source), ""


def _release_of(host: Host, build_dir: str) -> str | None:
    text = read_bytes(host, f"{build_dir}/{_UTS_RELEASE_FILE}") or b""
    match = _UTS_RELEASE.search(text)
    return match[1].decode("utf-8", "replace") if match else None


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        raise ProbeError(f"{path} cannot be read: {error.strerror}") from error
