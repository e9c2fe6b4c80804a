"""``gpuguard config init | validate | show``, as a person and as a script see them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gpuguard.cli.config import app, example
from gpuguard.cli.context import Context
from gpuguard.errors import ConfigError, GpuguardError, PrivilegeError
from gpuguard.host import LocalHost

FILE = "/etc/gpuguard/gpuguard.yaml"
MINIMAL = "source: {path: /}\nbuild: {user: nobody}\n"


def run(tree: Path, *arguments: str, as_json: bool = False) -> Result:
    """Run ``gpuguard --root tree config ...`` below the part that main() adds."""
    context = Context(host=LocalHost(tree), config_file=FILE, json=as_json)
    return CliRunner().invoke(app, list(arguments), obj=context)


def error_of(result: Result) -> GpuguardError:
    """The error that main() turns into a message and an exit status."""
    assert isinstance(result.exception, GpuguardError), result.output
    return result.exception


def write(tree: Path, text: str, name: str = "gpuguard.yaml") -> Path:
    path = tree / "etc/gpuguard" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_init_writes_an_example_that_validates(tmp_path: Path) -> None:
    result = run(tmp_path, "init")
    assert result.output == (
        f"wrote {FILE}; set source.path in it, then run:\n  gpuguard config validate\n"
    )
    assert (tmp_path / "etc/gpuguard/gpuguard.yaml").read_text() == example()
    assert run(tmp_path, "validate").stdout == f"{FILE}: ok\n"


def test_init_leaves_an_existing_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "mine")
    error = error_of(run(tmp_path, "init"))
    assert (error.code, error.exit_status) == ("config-exists", 78)
    assert str(error) == f"{FILE}: exists, and is left alone"
    assert path.read_text() == "mine"


def test_init_with_force_keeps_what_was_there(tmp_path: Path) -> None:
    path = write(tmp_path, "mine")
    assert run(tmp_path, "init", "--force").exit_code == 0
    assert path.read_text() == example()
    assert path.with_name("gpuguard.yaml.old").read_text() == "mine"


def test_init_with_force_twice_keeps_both(tmp_path: Path) -> None:
    path = write(tmp_path, "first")
    run(tmp_path, "init", "--force")
    path.write_text("second")
    result = run(tmp_path, "init", "--force", as_json=True)
    assert json.loads(result.output) == {"schema": 1, "file": FILE, "kept": f"{FILE}.old.2"}
    assert path.with_name("gpuguard.yaml.old").read_text() == "first"
    assert path.with_name("gpuguard.yaml.old.2").read_text() == "second"
    assert f"kept as {FILE}.old.3\n" in run(tmp_path, "init", "--force").output


def test_init_to_stdout_writes_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "init", "--stdout").output == example()
    assert list(tmp_path.iterdir()) == []


def test_init_answers_in_json(tmp_path: Path) -> None:
    assert json.loads(run(tmp_path, "init", as_json=True).output) == {
        "schema": 1,
        "file": FILE,
        "kept": None,
    }


def test_init_without_permission_says_who_may(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    run(tmp_path, "init", "--stdout")  # imports what it needs while it may read everything
    with as_ordinary_user():
        result = run(tmp_path, "init")
    error = error_of(result)
    assert isinstance(error, PrivilegeError)
    assert error.hint == "run as root: sudo gpuguard config init"


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Be nobody for a while; a person who is not root already is somebody else."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


def test_init_where_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("not a folder")
    error = error_of(run(tmp_path, "init"))
    assert error.code == "config-unwritable"


def test_validate_names_every_file_that_was_read(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL)
    write(tmp_path, "build: {jobs: 2}", "gpuguard.d/1.yaml")
    result = run(tmp_path, "validate")
    assert result.exit_code == 0
    assert result.output == f"{FILE}: ok\n/etc/gpuguard/gpuguard.d/1.yaml: ok\n"


def test_validate_fails_with_all_problems(tmp_path: Path) -> None:
    write(tmp_path, "a: 1\n")
    error = error_of(run(tmp_path, "validate"))
    assert error.exit_status == 78
    assert error.detail.splitlines()[1] == "gpuguard.yaml: source.path: required key is missing"


def test_validate_lists_the_problems_in_json(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL + "backups: {kep: 1}\n")
    result = run(tmp_path, "validate", as_json=True)
    assert result.exit_code == 78
    assert json.loads(result.output) == {
        "schema": 1,
        "valid": False,
        "problems": [
            {
                "file": "gpuguard.yaml",
                "key": "backups.kep",
                "message": "unknown key; did you mean backups.keep?",
            }
        ],
    }


def test_validate_takes_another_file(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "new.yaml")
    result = run(tmp_path, "validate", "/etc/gpuguard/new.yaml", as_json=True)
    assert json.loads(result.output) == {
        "schema": 1,
        "valid": True,
        "files": ["/etc/gpuguard/new.yaml"],
        "warnings": [],
    }


def test_validate_warns_of_what_a_build_will_miss(tmp_path: Path) -> None:
    write(tmp_path, "source: {path: /opt/source}")
    write(tmp_path, "build: {user: nobody-of-that-name}", "gpuguard.d/1.yaml")
    result = run(tmp_path, "validate")
    assert result.exit_code == 0
    assert result.stderr == (
        "warning: gpuguard.yaml: source.path: /opt/source is not a folder (yet)\n"
        "warning: gpuguard.d/1.yaml: build.user: there is no account nobody-of-that-name (yet)\n"
    )
    warnings = json.loads(run(tmp_path, "validate", as_json=True).output)["warnings"]
    assert [warning["key"] for warning in warnings] == ["source.path", "build.user"]


def test_no_warning_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "opt/source").mkdir(parents=True)
    write(tmp_path, "source: {path: /opt/source}\nbuild: {user: nobody}\n")
    assert run(tmp_path, "validate").stderr == ""


def test_validate_a_relative_file_is_meant_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here.yaml").write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    context = Context(host=LocalHost("/"), config_file=FILE, json=False)
    result = CliRunner().invoke(app, ["validate", "here.yaml"], obj=context)
    assert result.output == f"{tmp_path}/here.yaml: ok\n"


def test_show_has_every_value_and_where_it_comes_from(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL)
    write(tmp_path, "build: {jobs: 2}", "gpuguard.d/1.yaml")
    lines = [" ".join(line.split()) for line in run(tmp_path, "show").output.splitlines()]
    assert 'source.path: "/" # gpuguard.yaml' in lines
    assert "build.jobs: 2 # gpuguard.d/1.yaml" in lines
    assert "backups.keep: 5 # default" in lines


@pytest.mark.parametrize(("arguments", "as_json"), [(["show", "--json"], False), (["show"], True)])
def test_show_in_json(tmp_path: Path, arguments: list[str], *, as_json: bool) -> None:
    write(tmp_path, MINIMAL)
    shown = json.loads(run(tmp_path, *arguments, as_json=as_json).output)
    assert (shown["schema"], shown["files"]) == (1, [FILE])
    assert shown["values"]["source.path"] == {"value": "/", "origin": "gpuguard.yaml"}
    assert shown["values"]["source.ref"] == {"value": None, "origin": "default"}


def test_show_without_a_file(tmp_path: Path) -> None:
    error = error_of(run(tmp_path, "show"))
    assert isinstance(error, ConfigError)
    assert error.code == "config-missing"
