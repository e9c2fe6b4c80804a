"""What is written about the configuration agrees with what is accepted."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from gpuguard.config import Config, SourceConfig
from gpuguard.config_check import leaf_keys
from gpuguard.config_file import LoadedConfig, load
from gpuguard.config_yaml import key_text
from gpuguard.host import LocalHost

RESOURCES = resources.files("gpuguard").joinpath("resources")
EXAMPLE = RESOURCES.joinpath("gpuguard.yaml.example").read_text()
MANUAL = RESOURCES.joinpath("man/gpuguard.yaml.5").read_text()


def load_text(tree: Path, text: str) -> LoadedConfig:
    """Load a configuration that consists of one file."""
    (tree / "gpuguard.yaml").write_text(text)
    return load(LocalHost(tree), "/gpuguard.yaml")


def test_the_example_is_valid_and_changes_no_default(tmp_path: Path) -> None:
    config = load_text(tmp_path, EXAMPLE).config
    assert config == Config(source=SourceConfig(path="/opt/open-gpu-kernel-modules"))


def test_the_example_shows_every_key_with_its_default(tmp_path: Path) -> None:
    lines = [line.replace("#", "", 1) if is_default(line) else line for line in EXAMPLE.split("\n")]
    loaded = load_text(tmp_path, "\n".join(lines))
    assert set(loaded.origins.values()) == {"gpuguard.yaml"}
    assert loaded.config == Config(source=SourceConfig(path="/opt/open-gpu-kernel-modules"))


def is_default(line: str) -> bool:
    """``#key: value``; prose has a space after the number sign."""
    comment = line.lstrip()
    return comment.startswith("#") and comment[1:2].isalpha()


def test_every_key_is_in_the_manual() -> None:
    assert [key for key in map(key_text, leaf_keys()) if f".TP\n.B {key}\n" not in MANUAL] == []


def test_the_manual_names_no_other_key() -> None:
    named = {line[3:] for line in MANUAL.split("\n.TP\n") if line.startswith(".B ")}
    assert {name.split("\n")[0] for name in named} == set(map(key_text, leaf_keys()))


def test_keys_follow_the_records() -> None:
    sections = {field.name for field in dataclasses.fields(Config)}
    assert {str(path[0]) for path in leaf_keys()} == sections


@pytest.mark.parametrize(
    "linter",
    [
        ("man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z"),
        ("mandoc", "-Tlint"),
    ],
    ids=lambda argv: argv[0],
)
@pytest.mark.parametrize(
    "page", sorted(Path(str(RESOURCES.joinpath("man"))).iterdir()), ids=lambda page: page.name
)
def test_manual_pages_are_clean(page: Path, linter: tuple[str, ...]) -> None:
    if shutil.which(linter[0]) is None:
        pytest.skip(f"{linter[0]} is not installed: apt-get install man-db mandoc")
    done = subprocess.run([*linter, page], capture_output=True, text=True, check=False)
    # man sends the page to stdout and its warnings to stderr, mandoc its findings to stdout.
    assert (done.stdout if linter[0] == "mandoc" else done.stderr) == ""
