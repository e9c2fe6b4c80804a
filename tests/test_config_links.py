"""Symbolic links in the configuration that lead nowhere: named, for root and for everybody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuguard.cli.config import example
from tests.box import Box
from tests.trees import make_tree

FILES = {"gpuguard.yaml": "etc/gpuguard/gpuguard.yaml", "drop-in": "etc/gpuguard/gpuguard.d/1.yaml"}


@pytest.fixture(params=["root", "nobody"])
def user(request: pytest.FixtureRequest) -> str | None:
    """The program's account; None: the one that runs the tests."""
    if request.param == "nobody" and os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    return None if request.param == "root" else str(request.param)


@pytest.fixture
def tree(empty_root: Path) -> Box:
    make_tree(empty_root, {FILES["gpuguard.yaml"]: example()})
    return Box(empty_root)


@pytest.mark.parametrize("which", FILES)
@pytest.mark.parametrize("target", ["/etc/nothing.yaml", "nothing/below.yaml"])
def test_a_link_to_nothing_is_named(tree: Box, which: str, target: str, user: str | None) -> None:
    link(tree.path(FILES[which]), target)
    answer = tree.run("config", "validate", user=user)
    assert answer.status == 78
    name = FILES[which].removeprefix("etc/gpuguard/")
    assert f"  | {name}: is a symbolic link to nothing\n" in answer.err


@pytest.mark.parametrize("which", FILES)
def test_a_link_to_itself_is_named(tree: Box, which: str, user: str | None) -> None:
    link(tree.path(FILES[which]), tree.path(FILES[which]).name)
    answer = tree.run("config", "validate", user=user)
    assert answer.status == 78
    assert answer.err.startswith(
        f"gpuguard: /{FILES[which]}: cannot be read: Too many levels of symbolic links "
        "[config-unreadable]\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="checked for root alone")
def test_a_link_to_where_others_may_create_the_file(tree: Box) -> None:
    folder = tree.path("srv/open")
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    link(tree.path(FILES["drop-in"]), "/srv/open/mine.yaml")
    assert tree.json("config", "validate").error["code"] == "config-untrusted"


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
