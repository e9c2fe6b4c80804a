"""What apt would do, and what its packages are. Nothing here changes an installed package.

apt has no flag that makes it work on another root as a whole: in a tree that is not ``/`` the
tree's own apt is run, by chroot.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuguard.core.upgrade import Change, parse_simulation
from gpuguard.errors import CommandError, CommandNotFoundError, PreflightError, ProbeError
from gpuguard.host import Host
from gpuguard.host.reading import list_dir

_QUERY_SECONDS = 120.0
_DOWNLOAD_SECONDS = 3600.0
_UPDATES_DIR = "/var/lib/dpkg/updates"
_FIELD = re.compile(r"^(\w[\w-]*): (.*)$", re.MULTILINE)
_UNMET = "unmet dependencies"
#: Only looks: no lock, no caches.
_NO_TRACES = (
    "-o", "Debug::NoLocking=1", "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=",
)  # fmt: skip
UPDATE_HINT = "run `apt-get update` as root, and check that the package archive can be reached"


def words_inside(host: Host, *argv: str, folder: str | None = None) -> tuple[str, ...]:
    """What to run so that a program of the host itself works on it, in one of its folders."""
    enter = () if host.is_live else ("chroot", str(host.root))
    change = () if folder is None else ("env", f"--chdir={folder}")
    return (*enter, *change, *argv)


def environment() -> Mapping[str, str]:
    """For apt and dpkg without a person: no questions, and by the proxy that this process has."""
    proxies = {name: value for name, value in os.environ.items() if name.endswith("_proxy")}
    return {
        **proxies,
        "DEBIAN_FRONTEND": "noninteractive",
        "DEBCONF_NONINTERACTIVE_SEEN": "true",
        "APT_LISTCHANGES_FRONTEND": "none",
        "NEEDRESTART_MODE": "l",  # lists what it would restart, and restarts nothing
        "UCF_FORCE_CONFFOLD": "1",
    }


def simulate(host: Host, words: Sequence[str], status: str) -> tuple[Change, ...]:
    """What ``apt-get install`` with these words would do if dpkg's status file were another.

    Args:
        host: where.
        words: options and packages.
        status: path inside the host of a copy of the status file, with other selections.

    Raises:
        CommandError: apt says that it cannot be done, and why.
    """
    done = host.run(
        *words_inside(host, "apt-get"),
        "--simulate", "--quiet",
        "-o", f"Dir::State::status={status}",
        "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=",
        "install", *words,
        timeout=_QUERY_SECONDS, env=environment(),
    )  # fmt: skip
    return parse_simulation(done.stdout)


def unfinished(host: Host) -> str:
    """What dpkg or apt says is half done, in their own words; empty: nothing.

    Also dependencies that are not met: packages that came alone are all configured.

    Raises:
        ProbeError: they cannot be asked.
    """
    try:
        done = host.run(
            *words_inside(host, "dpkg", "--audit"), timeout=_QUERY_SECONDS, ok=(0, 1)
        )  # fmt: skip
    except CommandError as error:
        raise ProbeError(f"dpkg --audit: {error.message}", hint=error.hint) from error
    if done.exit_status != 0 and not done.stdout.strip():
        raise ProbeError(f"dpkg --audit exited with {done.exit_status}: {done.stderr.strip()}")
    report = done.stdout.strip()
    if not report and has_pending_updates(host):
        return f"an interrupted dpkg left files in {_UPDATES_DIR}"
    return report or _unmet(host)


def has_pending_updates(host: Host) -> bool:
    """True if dpkg was interrupted: apt does nothing before dpkg --configure -a."""
    return any(name.isdecimal() for name in list_dir(host, _UPDATES_DIR))


def _unmet(host: Host) -> str:
    try:
        done = host.run(
            *words_inside(host, "apt-get"), "--quiet", *_NO_TRACES, "check",
            timeout=_QUERY_SECONDS, ok=None, env=environment(),
        )  # fmt: skip
    except CommandError as error:
        raise ProbeError(f"apt-get check: {error.message}", hint=error.hint) from error
    said = f"{done.stdout}\n{done.stderr}"
    if done.exit_status == 0:
        return ""
    if _UNMET not in said.lower():
        raise ProbeError(f"apt-get check exited with {done.exit_status}: {done.stderr.strip()}")
    return "\n".join(line for line in done.stdout.splitlines() if " : " in line) or said.strip()


def would_finish(host: Host, words: Sequence[str]) -> tuple[Change, ...] | None:
    """What ``apt-get --fix-broken install`` would change; None: apt cannot say."""
    done = host.run(
        *words_inside(host, "apt-get"), "--simulate", "--quiet", *_NO_TRACES,
        "--fix-broken", "install", *words,
        timeout=_QUERY_SECONDS, ok=None, env=environment(),
    )  # fmt: skip
    return parse_simulation(done.stdout) if done.exit_status == 0 else None


def native_architecture(host: Host) -> str:
    """Dpkg's own.

    Raises:
        CommandError: dpkg cannot be run.
    """
    done = host.run(
        *words_inside(host, "dpkg", "--print-architecture"), timeout=_QUERY_SECONDS
    )  # fmt: skip
    return done.stdout.strip()


def automatic(host: Host) -> frozenset[str]:
    """Packages that apt counts as installed automatically.

    Raises:
        CommandError: apt-mark failed.
    """
    done = host.run(*words_inside(host, "apt-mark", "showauto"), timeout=_QUERY_SECONDS)
    return frozenset(done.stdout.split())


def show(host: Host, specifications: Sequence[str]) -> dict[str, dict[str, str]]:
    """Package -> control fields, of ``NAME`` (what apt would install) or ``NAME=VERSION``.

    What apt does not know is left out.
    """
    if not specifications:
        return {}
    done = host.run(
        *words_inside(host, "apt-cache", "show", "--no-all-versions"), *specifications,
        timeout=_QUERY_SECONDS, ok=None,
    )  # fmt: skip
    stanzas = (dict(_FIELD.findall(stanza)) for stanza in done.stdout.split("\n\n"))
    return {fields["Package"]: fields for fields in stanzas if "Package" in fields}


def download(host: Host, package: str, version: str, folder: str) -> Path:
    """Fetch one package file into a folder inside the host; a path of this process.

    Raises:
        PreflightError: ``headers-download``: it cannot be fetched.
    """
    try:
        host.run(
            *words_inside(host, "apt-get", folder=folder),
            "download", "--quiet", f"{package}={version}",
            env=environment(), timeout=_DOWNLOAD_SECONDS,
        )  # fmt: skip
        return next(host.path(folder).glob(f"{package}_*.deb"))
    except CommandNotFoundError:
        raise
    except (CommandError, StopIteration) as error:
        raise PreflightError(
            f"{package} {version} cannot be downloaded",
            hint=UPDATE_HINT,
            code="headers-download",
            detail=error.detail if isinstance(error, CommandError) else "",
        ) from error


def download_all(host: Host, words: Sequence[str], status: str) -> None:
    """Fetch everything that an installation needs into apt's own archive, and install nothing.

    Raises:
        PreflightError: ``packages-download``.
    """
    try:
        host.run(
            *words_inside(host, "apt-get"),
            "--yes", "--quiet", "--download-only", "-o", f"Dir::State::status={status}",
            "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=",
            "install", *words,
            env=environment(), timeout=_DOWNLOAD_SECONDS,
        )  # fmt: skip
    except CommandNotFoundError:
        raise
    except CommandError as error:
        raise PreflightError(
            "the packages cannot be downloaded",
            hint=UPDATE_HINT,
            code="packages-download",
            detail=error.detail,
        ) from error
