"""Install what makes gpuguard work by itself: the use case behind ``setup``."""

from __future__ import annotations

import re
import shlex
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from gpuguard import __version__
from gpuguard.apply.actions import Action, PutFile, PutLink, RemoveFile
from gpuguard.apply.transaction import apply
from gpuguard.config import BuildConfig, Config
from gpuguard.core.apt_check import REFUSED, expression
from gpuguard.core.setup import (
    LIBRARY,
    Item,
    Record,
    SetupPlan,
    items,
    plan_setup,
    started_units,
)
from gpuguard.errors import CommandError, PreflightError, UsageError
from gpuguard.host import Host
from gpuguard.probes.automation import mark_of
from gpuguard.probes.dependents import Dependent
from gpuguard.setup_record import read_setup, setup_bytes
from gpuguard.state import SETUP_FILE
from gpuguard.verbs.clock import now
from gpuguard.verbs.setup_trust import refuse_untrusted

_FOLDERS = (
    "apt", "kernel", "logind", "man", "systemd", "tmpfiles", "prometheus", "grafana/dashboards",
    "grafana/provisioning/dashboards", "grafana/provisioning/datasources",
)  # fmt: skip
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./+-]+")
_ACCOUNT_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a set-up would do. ``account``: one that has to be made.

    ``is_upgrade``: another version of gpuguard did the last one. ``needed_by``: of a removal,
    units that cannot start without ours.
    """

    plan: SetupPlan
    units: tuple[str, ...] = ()
    account: str | None = None
    is_upgrade: bool = False
    needed_by: tuple[Dependent, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if nothing has to be changed."""
        return not (self.plan.changes or self.account or self.is_upgrade)


def prepare(
    host: Host,
    config: Config | None,
    completions: Mapping[str, str],
    *,
    program: str | None = None,
    force: bool = False,
) -> Prepared:
    """Decide what a set-up does.

    Raises:
        UsageError: the program that hooks and units are to call cannot be told.
        PreflightError: others than root can change what root would run, or it does not run.
        StateError: the record of the last set-up cannot be read.
    """
    program = find_program(host, program)
    refuse_untrusted(host, program)
    scripts = {f"completion/{shell}": text.encode() for shell, text in completions.items()}
    content = {**_resources(), **scripts}
    values = {
        "PROGRAM": program,
        "LIBRARY": LIBRARY,
        "PACKAGES": expression(),
        "REFUSED": str(REFUSED),
    }
    wanted = items(content, values)
    record = read_setup(host)
    account = _missing_account(host, config)
    made = account or (record.account if record is not None else None)
    plan = plan_setup(
        wanted,
        found_marks(host, wanted, record),
        record,
        program=program,
        account=made,
        created=now(),
        version=__version__,
        force=force,
    )
    return Prepared(
        plan=plan,
        units=started_units(content),
        account=account,
        is_upgrade=record is not None and record.version != __version__,
    )


def install(host: Host, prepared: Prepared) -> None:
    """Make the account, then put all files and links in place in one transaction.

    The caller holds the lock and has recovered an interrupted change.

    Raises:
        CommandError: the account cannot be made; nothing else was changed.
        GpuguardError: see ``transaction.apply``.
    """
    if prepared.account is not None:
        _make_account(host, prepared.account)
    apply_plan(host, prepared.plan)


def find_program(host: Host, given: str | None = None) -> str:
    """The path, inside the host, of the program that hooks and units call.

    Raises:
        UsageError: none can be found, or it has a name that shells and systemd would take apart.
    """
    candidates = [given] if given is not None else _own_paths()
    for path in candidates:
        if path.startswith("/") and _is_executable(host, path):
            if not _PLAIN_PATH.fullmatch(path):
                raise UsageError(
                    f"{path}: only letters, digits and _ . / + - may be in the program's path",
                    code="program-path",
                    hint="install gpuguard elsewhere, e.g. in /opt/gpuguard",
                )
            return path
    where = given or " or ".join(candidates)
    raise UsageError(
        f"{where} is not a program in {host.root}",
        code="setup-program-missing",
        hint="say where gpuguard is installed there: gpuguard setup --program /opt/gpuguard/bin/"
        "gpuguard",
    )


def program_of(host: Host, given: str | None = None) -> str:
    """The same; in a tree, the one that its own set-up recorded comes first.

    Raises:
        UsageError: none can be found.
        StateError: the record of the set-up cannot be read.
    """
    record = read_setup(host) if given is None and not host.is_live else None
    if record is not None and _is_executable(host, record.program):
        return record.program
    return find_program(host, given)


def _own_paths() -> list[str]:
    # a link to the program of a virtual environment (/usr/local/bin) would do, too; the
    # environment itself cannot be redirected
    beside = Path(sys.executable).parent / "gpuguard"
    called = Path(sys.argv[0])
    return [str(beside), *([str(called.resolve())] if called.name == "gpuguard" else [])]


def _is_executable(host: Host, path: str) -> bool:
    with suppress(OSError):
        status = host.path(path).stat()
        return stat.S_ISREG(status.st_mode) and bool(status.st_mode & 0o111)
    return False


@cache
def _resources() -> Mapping[str, bytes]:
    top = resources.files("gpuguard").joinpath("resources")
    found = {"gpuguard.yaml.example": top.joinpath("gpuguard.yaml.example").read_bytes()}
    for folder in _FOLDERS:
        found |= {f"{folder}/{file.name}": file.read_bytes() for file in _files(top, folder)}
    return found


def _files(top: Traversable, folder: str) -> list[Traversable]:
    return [entry for entry in top.joinpath(folder).iterdir() if entry.is_file()]


def found_marks(host: Host, wanted: Sequence[Item], record: Record | None) -> dict[str, str | None]:
    """What is there now at every path that a set-up knows, as ``plan_setup`` takes it."""
    paths = {item.path for item in wanted} | set(record.marks if record is not None else ())
    return {path: mark_of(host, path) for path in paths}


def apply_plan(host: Host, plan: SetupPlan) -> None:
    """All of it in one transaction, the record included."""
    actions: list[Action] = []
    for step in plan.changes:
        item = step.item
        if item is None:
            actions.append(RemoveFile(path=step.path))
        elif item.content is not None:
            actions.append(PutFile(path=item.path, source=item.content, mode=item.mode))
        else:
            actions.append(PutLink(path=item.path, target=item.target or ""))
    if plan.record is None:
        actions.append(RemoveFile(path=SETUP_FILE))
    else:
        actions.append(PutFile(path=SETUP_FILE, source=setup_bytes(plan.record)))
    apply(actions, host, verb="setup", release="gpuguard", started=now(), backup=None)


def _missing_account(host: Host, config: Config | None) -> str | None:
    name = config.build.user if config is not None else BuildConfig().user
    try:
        text = host.path("/etc/passwd").read_text("utf-8", "replace")
    except OSError:
        return None  # no accounts at all: a bare tree
    return None if any(line.startswith(f"{name}:") for line in text.splitlines()) else name


def _make_account(host: Host, name: str) -> None:
    where = () if host.is_live else ("--prefix", str(host.root))
    words = (
        "useradd", *where, "--system", "--user-group", "--no-create-home",
        "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin",
        "--comment", "gpuguard compiles as this account", name,
    )  # fmt: skip
    try:
        host.run(*words, timeout=_ACCOUNT_SECONDS)
    except CommandError as error:
        raise PreflightError(
            f"the account {name} could not be made: {error.message}",
            code="account-failed",
            hint=f"make it by hand, then try again: {shlex.join(words)}",
            detail=error.detail,
        ) from error
