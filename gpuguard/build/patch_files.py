"""Which patch files are configured, and whether they can be used."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from gpuguard.build.records import Blocker, PatchFile
from gpuguard.build.source import expand
from gpuguard.build.trust import Trust
from gpuguard.host import Host
from gpuguard.host.files import sha256_file

_GLOB = re.compile(r"[*?\[]")
#: A unified or context hunk, or a git header that changes a name or a mode without one.
_CHANGE = re.compile(rb"^(?:@@ |\*\*\* \d|rename to |deleted file |new file )")


def find(
    host: Host, configured: Sequence[str], driver_version: str | None, trust: Trust
) -> tuple[tuple[PatchFile, ...], tuple[Blocker, ...]]:
    """The configured patches in order, and what is wrong with them; reads only."""
    patches: list[PatchFile] = []
    blockers: list[Blocker] = []
    for entry in configured:
        name = expand(entry, driver_version)
        paths = _paths(host, name)
        if not paths:
            blockers.append(_missing(name))
        for path in paths:
            problem = _problem(host, path, trust)
            if problem is None:
                patches.append(PatchFile(path=path, sha256=sha256_file(host.path(path))))
            else:
                blockers.append(problem)
    return tuple(patches), tuple(blockers)


def fingerprint(patches: Sequence[PatchFile]) -> str:
    """One word for the content and order of all patches; "none" without any."""
    if not patches:
        return "none"
    return hashlib.sha256("\0".join(p.sha256 for p in patches).encode()).hexdigest()


def _paths(host: Host, name: str) -> list[str]:
    if not name.startswith("/"):
        return []
    if not _GLOB.search(name):
        return [name] if host.path(name).is_file() else []
    folder, _, pattern = name.rpartition("/")
    return sorted(f"{folder}/{p.name}" for p in host.path(folder or "/").glob(pattern))


def _missing(name: str) -> Blocker:
    return Blocker(
        code="patch-missing",
        message=f"no patch file {name}",
        hint="source.patches: absolute paths; {driver_version} is filled in",
        exit_status=os.EX_CONFIG,
    )


def _problem(host: Host, path: str, trust: Trust) -> Blocker | None:
    real = host.path(path)
    try:
        distrust = trust.problem(host, path)
        empty = not _changes_something(real)
    except OSError as error:
        return _missing(f"{path} that can be read ({error.strerror})")
    if distrust is not None:
        return Blocker(
            code="patch-untrusted",
            message=f"root would apply a patch that others can write: {distrust}",
            hint=f"chown root:root {path} && chmod go-w {path}, in a folder of root's, "
            "or name the account you trust in source.trusted_owner",
            exit_status=os.EX_CONFIG,
        )
    if empty:
        return Blocker(
            code="patch-empty",
            message=f"patch {path} has no hunk: it changes nothing",
            hint="check where it was downloaded or generated; an error page is no patch",
            exit_status=os.EX_DATAERR,
        )
    return None


def _changes_something(path: Path) -> bool:
    with path.open("rb") as file:
        return any(_CHANGE.match(line) for line in file)
