"""Whoever can write the program, what it imports, or our folder of hooks becomes root."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpuguard.build.trust import Trust, trust_in
from gpuguard.core.setup import LIBRARY
from gpuguard.errors import CommandError, PreflightError
from gpuguard.host import Host
from gpuguard.host.files import writable_by_others

_ASK_SECONDS = 20.0
#: Where imports come from. Finds gpuguard without running it; editable installs included.
_ASK = (
    "import importlib.util as u, sys; s = u.find_spec('gpuguard'); "
    "print(s.origin if s else ''); print(*sys.path, sep='\\n')"
)
# pip writes the second where the path is too long, or has blanks
_INTERPRETER = re.compile(
    rb"\A#!\s*(?:(?:/usr)?/bin/env\s+)?(\S*python[\d.]*)\s"
    rb"|\A#!/bin/sh\n'''exec' \"?([^\"\n]+?)\"? \""
)


def refuse_untrusted(host: Host, program: str) -> None:
    """Refuse what root would run by itself, if others than root can change it.

    Raises:
        PreflightError: they can (``program-untrusted``), or it does not run at all
            (``program-broken``).
    """
    if os.geteuid() != 0:
        return
    trust = trust_in(None)
    reason = next(_problems(host, program, trust), None)
    if reason is not None:
        raise PreflightError(
            f"root would run by itself what others can write: {reason}",
            code="program-untrusted",
            hint="install gpuguard as root in a folder of root's, e.g. /opt/gpuguard, not "
            "editable (pip install .), or take the right to write away: chown -R root:root, "
            "chmod -R go-w",
        )


def _problems(host: Host, program: str, trust: Trust) -> Iterator[str]:
    first = trust.problem(host, program) or writable_by_others(
        host.root / LIBRARY.lstrip("/"), root=host.root, missing_ok=True
    )
    if first is not None:
        yield first
    environment = host.path(program).parent.parent
    if (environment / "pyvenv.cfg").is_file():
        reason = trust.problem_within(environment, host.root)
        if reason is not None:
            yield reason
        for folder in sorted(environment.glob("lib*/python*/site-packages")):
            yield from _named_elsewhere(host, folder, trust)
    if host.is_live:
        yield from _imported(host, program, trust)


def _named_elsewhere(host: Host, site: Path, trust: Trust) -> Iterator[str]:
    """Folders outside an environment that its files name: read, so that it works on trees."""
    for record in sorted(site.glob("gpuguard-*.dist-info/direct_url.json")):
        folder = _editable(record)
        if folder and (reason := _within(host, folder, trust)):
            yield f"gpuguard is an editable install of {folder}: {reason}"
    for file in sorted(site.glob("*.pth")):
        for line in file.read_text("utf-8", "replace").splitlines():
            if line.startswith("/") and (reason := _within(host, line.strip(), trust)):
                yield f"{file.name} lets Python import from {line.strip()}: {reason}"


def _editable(record: Path) -> str:
    """The folder that an editable install leads to (PEP 610); empty if it is none."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        document = json.loads(record.read_bytes())
        if document["dir_info"].get("editable"):
            return unquote(urlsplit(document["url"]).path)
    return ""


def _within(host: Host, folder: str, trust: Trust) -> str | None:
    real = host.path(folder)
    if not real.exists():
        return _could_put(host, folder)
    return trust.problem(host, folder) or trust.problem_within(real.resolve(), host.root)


def _could_put(host: Host, path: str) -> str | None:
    """Whether others could put there what is not there."""
    return writable_by_others(host.root / path.lstrip("/"), root=host.root, missing_ok=True)


def _imported(host: Host, program: str, trust: Trust) -> Iterator[str]:
    interpreter = _interpreter(host, program)
    if interpreter is None:
        return  # not Python's
    if interpreter.startswith("/") and (reason := trust.problem(host, interpreter)):
        yield reason
        return
    try:
        done = host.run(interpreter, "-I", "-c", _ASK, timeout=_ASK_SECONDS)
    except CommandError as error:
        raise _broken(program, interpreter, error.detail or error.message) from error
    origin, *folders = done.stdout.splitlines() or [""]
    if not origin:
        raise _broken(program, interpreter, "it has no module gpuguard")
    if reason := _within(host, str(Path(origin).parent), trust):
        yield f"gpuguard is imported from {Path(origin).parent}: {reason}"
    for folder in folders:
        if folder.startswith("/") and (reason := _could_put(host, folder)):
            yield f"Python imports from {folder}: {reason}"


def _interpreter(host: Host, program: str) -> str | None:
    with host.path(program).open("rb") as file:
        match = _INTERPRETER.match(file.read(1024))
    return None if match is None else os.fsdecode(match[1] or match[2])


def _broken(program: str, interpreter: str, why: str) -> PreflightError:
    return PreflightError(
        f"{program} would not run: {interpreter}: {why.strip().splitlines()[-1]}",
        code="program-broken",
        hint=f"see {program} --version; install gpuguard anew, or name another with --program",
    )
