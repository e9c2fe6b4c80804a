"""What DKMS believes: its ``status`` command, and the state tree itself.

``dkms status`` is a bash script of 0.05 to 0.5 s, grows with modules times kernels, and
cannot look into another root whose ``source`` links are absolute, as DKMS makes them (3.0.10
on a mounted disk: "Could not locate dkms.conf file" on stderr, nothing on stdout). The tree
*is* the state, so ``read_tree`` answers for every root in milliseconds; only the remarks,
for which DKMS compares files, are missing.
"""

from __future__ import annotations

import re

from gpuguard.core.facts import DkmsEntry
from gpuguard.errors import CommandError, ProbeError
from gpuguard.host.port import Host
from gpuguard.host.reading import list_dir, real_path

_TREE = "/var/lib/dkms"
_TIMEOUT = 30.0
_STATES = ("added", "built", "installed", "broken")
#: ``module/version`` (3.x) or ``module, version`` (2.8), perhaps ``, release, arch``.
_SUBJECT = re.compile(
    r"(?P<module>[^\s,/:]+)(?:/|,\s*)(?P<version>[^\s,/:]+)"
    r"(?:,\s*(?P<release>[^\s,]+),\s*(?P<architecture>[^\s,:]+))?"
)
#: ``installed (remark)``, ``installed-weak from 6.1.0-47-amd64``, ``built``.
_STATE = re.compile(r"(?P<state>[a-z-]+)(?:\s+from\s+(?P<origin>\S+))?\s*(?:\((?P<remark>.*)\))?")


def parse_status(text: str) -> tuple[DkmsEntry, ...]:
    """Entries of ``dkms status``, of 2.8 and of 3.x; lines that are no entries are left out.

    The state is the word after the last ``": "`` outside brackets; an unknown remark is
    kept. ``installed-weak`` keeps its name, with the origin in the remark.
    """
    return tuple(entry for line in text.splitlines() if (entry := _parse_line(line.strip())))


def probe_dkms(host: Host) -> tuple[DkmsEntry, ...]:
    """What ``dkms status`` says, or the tree where the program is missing or gives up.

    Raises:
        ProbeError: neither can be read.
    """
    if not host.has_program("dkms") or real_path(host, _TREE) is None:
        return read_tree(host)
    trees: tuple[str, ...] = ()
    if not host.is_live:
        trees = (
            "--dkmstree", str(host.path(_TREE)),
            "--sourcetree", str(host.path("/usr/src")),
            "--installtree", str(host.path("/lib/modules")),
        )  # fmt: skip
    try:
        done = host.run("dkms", *trees, "status", timeout=_TIMEOUT)
    except CommandError:
        return read_tree(host)
    entries = () if "Error!" in done.stderr else parse_status(done.stdout)
    return entries or read_tree(host)  # exit status 0 and no output: also if it may not read


def read_tree(host: Host) -> tuple[DkmsEntry, ...]:
    """Every module, version and release in DKMS's state tree, sorted by name.

    Layout (dkms(8), "/var/lib/dkms"): ``<module>/<version>/source`` says added,
    ``<module>/<version>/<release>/<arch>/module/`` built, and the link
    ``<module>/kernel-<release>-<arch>`` to the built folder installed.

    Raises:
        ProbeError: the tree is there but cannot be read.
    """
    try:
        return tuple(
            entry
            for module in list_dir(host, _TREE)
            for version in _directories(host, f"{_TREE}/{module}")
            if not version.startswith(("kernel-", "original_module"))
            for entry in _of_version(host, module, version)
        )
    except OSError as error:
        raise ProbeError(f"{_TREE} cannot be read: {error.strerror}") from error


def _parse_line(line: str) -> DkmsEntry | None:
    subject = _SUBJECT.match(line)
    if subject is None or not line[subject.end() :].startswith(":"):
        return None
    state = _STATE.fullmatch(line[subject.end() + 1 :].strip())
    if state is None or not state["state"].startswith(_STATES):
        return None
    origin = f"from {state['origin']}" if state["origin"] else ""
    return DkmsEntry(
        module=subject["module"],
        version=subject["version"],
        release=subject["release"],
        architecture=subject["architecture"],
        state=state["state"],
        remark=" ".join(filter(None, (origin, state["remark"]))),
    )


def _of_version(host: Host, module: str, version: str) -> list[DkmsEntry]:
    top = f"{_TREE}/{module}/{version}"
    built = [
        DkmsEntry(
            module=module,
            version=version,
            release=release,
            architecture=architecture,
            state="installed"
            if _is_active(host, module, version, release, architecture)
            else "built",
        )
        for release in _directories(host, top)
        if release not in ("source", "build")
        for architecture in _directories(host, f"{top}/{release}")
        if real_path(host, f"{top}/{release}/{architecture}/module") is not None
    ]
    if built:
        return built
    # With --sourcetree DKMS links to the path as it was given, outside the root's own view.
    source = host.path(f"{top}/source", follow=False)
    is_whole = real_path(host, f"{top}/source") is not None or source.exists()
    state = "added" if is_whole else "broken"
    return [DkmsEntry(module=module, version=version, release=None, architecture=None, state=state)]


def _is_active(host: Host, module: str, version: str, release: str, architecture: str) -> bool:
    link = real_path(host, f"{_TREE}/{module}/kernel-{release}-{architecture}")
    built = real_path(host, f"{_TREE}/{module}/{version}/{release}/{architecture}")
    return link is not None and link == built


def _directories(host: Host, absolute: str) -> list[str]:
    path = real_path(host, absolute)
    if path is None or not path.is_dir():
        return []
    names = list_dir(host, absolute)
    return [
        name
        for name in names
        if not name.startswith(".") and (path / name).is_dir() and not (path / name).is_symlink()
    ]
