"""Whom root would run by itself: ``gpuguard setup`` looks before it installs anything."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuguard.errors import PreflightError
from gpuguard.host import LocalHost
from gpuguard.verbs.setup_trust import refuse_untrusted
from tests.box import Box
from tests.setupbox import PROGRAM, around, furnish, setup


@pytest.fixture
def host(box: Box) -> Box:
    return furnish(box)


def test_a_program_that_others_can_write_is_refused(host: Box) -> None:
    if os.geteuid() != 0:
        pytest.skip("root alone distrusts")
    host.path(PROGRAM).chmod(0o775)
    os.chown(host.path(PROGRAM), 0, 100)
    before = around(host)
    answer = setup(host)
    assert (answer.status, answer.error["code"]) == (69, "program-untrusted")
    assert around(host) == before


@pytest.mark.parametrize("what", ["lib/python3/site-packages/gpuguard/__main__.py", "bin/python"])
def test_so_is_one_whose_environment_others_can_write(host: Box, what: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("root alone distrusts")
    environment = host.path(PROGRAM).parents[1]
    (environment / "pyvenv.cfg").touch()
    file = environment / what
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    assert setup(host, "--dry-run").status == 0
    os.chown(file, 65534, 65534)
    answer = setup(host)
    assert (answer.status, answer.error["code"]) == (69, "program-untrusted")
    assert str(file) in answer.error["message"]


def test_so_is_a_folder_of_hooks_that_others_can_write(host: Box) -> None:
    if os.geteuid() != 0:
        pytest.skip("root alone distrusts")
    folder = host.path("/usr/local/lib")
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    answer = setup(host)
    assert (answer.status, answer.error["code"]) == (69, "program-untrusted")


def test_the_program_must_be_there_and_have_a_plain_name(host: Box) -> None:
    assert host.json("setup").error["code"] == "setup-program-missing", "ours is not in this tree"
    odd = host.root / "opt/my gpuguard"
    odd.write_text("#!/bin/sh\n")
    odd.chmod(0o755)
    answer = host.json("setup", "--program", "/opt/my gpuguard")
    assert (answer.status, answer.error["code"]) == (2, "program-path")


SITE = "lib/python3.11/site-packages"


def elsewhere(host: Box) -> Path:
    """An environment of root's, and sources of somebody else's."""
    if os.geteuid() != 0:
        pytest.skip("root alone distrusts")
    environment = host.path(PROGRAM).parents[1]
    (environment / SITE).mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    sources = host.root / "home/me/gpuguard"
    (sources / "gpuguard").mkdir(parents=True)
    (sources / "gpuguard/__init__.py").touch()
    return environment / SITE


@pytest.mark.parametrize(
    "owned", ["home/me", "home/me/gpuguard", "home/me/gpuguard/gpuguard/__init__.py"]
)
@pytest.mark.parametrize("kind", ["path file", "editable"])
def test_so_is_one_that_is_imported_from_where_others_can_write(
    host: Box, kind: str, owned: str
) -> None:
    site = elsewhere(host)
    if kind == "path file":
        (site / "_gpuguard.pth").write_text("/home/me/gpuguard\n")
    else:
        info = site / "gpuguard-0.9.0.dist-info"
        info.mkdir()
        document = {"dir_info": {"editable": True}, "url": "file:///home/me/gpuguard"}
        (info / "direct_url.json").write_text(json.dumps(document))
    assert setup(host, "--dry-run").status == 0, "as long as all of it is root's"
    os.chown(host.root / owned, 65534, 65534)
    answer = setup(host, "--dry-run")
    assert (answer.status, answer.error["code"]) == (69, "program-untrusted")
    assert str(host.root / owned) in answer.error["message"]
    assert ("editable install of /home/me/gpuguard" if kind == "editable" else "_gpuguard.pth") in (
        answer.error["message"]
    )


def test_a_path_file_that_names_what_others_could_make_is_refused(host: Box) -> None:
    site = elsewhere(host)
    (site / "x.pth").write_text("/home/me/missing\n")
    assert setup(host, "--dry-run").status == 0
    os.chown(host.root / "home/me", 65534, 65534)
    assert setup(host, "--dry-run").error["code"] == "program-untrusted"


# --- what the program's own interpreter says; only on a running system --------------------


@pytest.fixture
def program() -> Iterator[Path]:
    """A program of root's in a place of root's, by this interpreter."""
    if os.geteuid() != 0:
        pytest.skip("root alone distrusts")
    with tempfile.TemporaryDirectory(dir="/root") as folder:
        file = Path(folder, "bin/gpuguard")
        file.parent.mkdir()
        yield file


def refused(program: Path) -> PreflightError | None:
    try:
        refuse_untrusted(LocalHost(), str(program))
    except PreflightError as error:
        return error
    return None


def interpreter(program: Path, body: str) -> None:
    """What the program would be run by."""
    python = program.with_name("python3")
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    program.write_text(f"#!{python}\nimport gpuguard\n")
    program.chmod(0o755)


def test_the_interpreter_is_asked_where_it_imports_from(program: Path, tmp_path: Path) -> None:
    package = program.parents[1] / "site/gpuguard"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    path = package.parent
    start = f"import sys; sys.path.insert(0, '{path}')"
    real = f'exec {sys.executable} -I -c "{start}; exec(sys.argv[1])" "$3"'
    interpreter(program, f'[ "$1 $2" = "-I -c" ] || exit 3\n{real}')
    own = refused(program)
    assert own is None or str(path) not in own.message
    os.chown(package / "__init__.py", 65534, 65534)
    error = refused(program)
    assert error is not None
    assert error.code == "program-untrusted"
    assert f"gpuguard is imported from {package}" in error.message


@pytest.mark.parametrize("body", ["echo ImportError >&2; exit 1", "echo", "exec /nonexistent"])
def test_a_program_that_would_not_run_is_refused(program: Path, body: str) -> None:
    interpreter(program, body)
    error = refused(program)
    assert error is not None
    assert error.code == "program-broken"


def test_a_folder_of_imports_that_others_can_write_is_refused(program: Path) -> None:
    package = program.parents[1] / "gpuguard"
    package.mkdir()
    (package / "__init__.py").touch()
    others = program.parents[1] / "others"
    others.mkdir()
    interpreter(program, f"echo {package}/__init__.py; echo {others}")
    assert refused(program) is None
    others.chmod(0o777)
    error = refused(program)
    assert error is not None
    assert f"Python imports from {others}" in error.message
