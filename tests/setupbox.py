"""A tree on which ``gpuguard setup`` is run, and what its tests ask of it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import pytest

from gpuguard.core.setup import UNIT_DIR
from tests import toys
from tests.box import Answer, Box

PROGRAM = "/opt/gpuguard/bin/gpuguard"
APT = "/etc/apt/apt.conf.d/99gpuguard"
HOOK = "/usr/local/lib/gpuguard/apt-hook"
TIMER = f"{UNIT_DIR}/gpuguard-rebuild.timer"
LINK = f"{UNIT_DIR}/timers.target.wants/gpuguard-rebuild.timer"
_STATE = ("var/lib/gpuguard", "var/cache/gpuguard", "var/log/gpuguard")


def furnish(box: Box) -> Box:
    """A tree with a gpuguard in it, and with the account that compiles."""
    for folder in ("etc/apt/apt.conf.d", "etc/systemd/system", "etc/kernel/postinst.d"):
        (box.root / folder).mkdir(parents=True)
    program = box.path(PROGRAM)
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (box.root / "etc/passwd").write_text("nobody:x:65534:65534::/:/bin/false\n")
    return box


def needs_systemctl() -> None:
    if shutil.which("systemctl") is None:
        pytest.skip("systemctl is not installed: apt-get install systemd")


def setup(host: Box, *words: str) -> Answer:
    return host.json("setup", "--program", PROGRAM, *words)


def installed(host: Box, *words: str) -> dict[str, Any]:
    answer = setup(host, *words)
    assert answer.status == 0, answer.out + answer.err
    return dict(answer.document)


def removed(host: Box, *words: str) -> dict[str, Any]:
    answer = host.json("setup", "--remove", *words)
    assert answer.status == 0, answer.out + answer.err
    return dict(answer.document)


def actions(document: Mapping[str, Any]) -> dict[str, str]:
    return {step["path"]: step["action"] for step in document["steps"]}


def around(host: Box) -> dict[str, str]:
    """All but gpuguard's own records."""
    return toys.snapshot(host.root, without=_STATE)
