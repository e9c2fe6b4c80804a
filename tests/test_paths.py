"""Paths inside a root never leave it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuguard.host import LocalHost
from gpuguard.host.paths import resolve_in_root
from tests.trees import Link, make_tree

NAMES = st.sampled_from(["a", "b", "c", "d"])
PARTS = st.lists(st.one_of(NAMES, st.sampled_from(["..", ".", ""])), max_size=8)
TARGETS = st.tuples(st.sampled_from(["", "/"]), PARTS).map(lambda t: t[0] + "/".join(t[1]) or ".")
#: Links at a, b/c, … that lead anywhere, also to each other and out of the root.
LINKS = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), TARGETS, max_size=6)


def plant(root: Path, links: dict[str, str]) -> None:
    for name, target in sorted(links.items()):
        path = root / name
        # Only below real folders: what a link leads to is not ours to write to.
        if any((root / p).is_symlink() for p in Path(name).parents) or os.path.lexists(path):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)


@settings(max_examples=300, deadline=None)
@given(links=LINKS, asked=PARTS, follow=st.booleans())
def test_never_leaves_the_root(links: dict[str, str], asked: list[str], follow: bool) -> None:
    top = Path(tempfile.mkdtemp(prefix="gpuguard-test-")).resolve()
    try:
        root = top / "deep" / "root"
        root.mkdir(parents=True)
        plant(root, links)
        try:
            found = resolve_in_root(root, "/" + "/".join(asked), follow_last=follow)
        except OSError as error:
            assert "symbolic links" in str(error)  # noqa: PT017 - a loop is a right answer
            return
        assert found == root or root in found.parents
        if follow:  # nothing is left for the system to follow out of the root
            assert Path(os.path.realpath(found)) == found
        else:
            assert Path(os.path.realpath(found.parent)) == found.parent
    finally:
        shutil.rmtree(top)


@settings(max_examples=100, deadline=None)
@given(links=LINKS, asked=PARTS)
def test_the_same_as_the_system_sees_after_chroot(links: dict[str, str], asked: list[str]) -> None:
    # A twin whose absolute targets name its own root is resolved by the system itself; the two
    # must agree as long as no ".." climbs out of the root.
    top = Path(tempfile.mkdtemp(prefix="gpuguard-test-")).resolve()
    root, twin = top / "root", top / "twin"
    wanted = "/".join(["", *(part for part in asked if part != "..")])
    inside = {name: target for name, target in links.items() if ".." not in target}
    try:
        for folder, prefix in ((root, ""), (twin, str(twin))):
            folder.mkdir()
            plant(folder, {n: prefix + t if t.startswith("/") else t for n, t in inside.items()})
        try:
            found = resolve_in_root(root, wanted)
        except OSError:
            return  # a loop
        assert found.relative_to(root) == Path(os.path.realpath(f"{twin}{wanted}")).relative_to(
            twin
        )
    finally:
        shutil.rmtree(top)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("/lib/modules/R/build", "usr/src/headers"),
        ("/lib/modules/R/build/Makefile", "usr/src/headers/Makefile"),
        ("lib/modules/R/build/../x", "usr/src/x"),
        ("/../../etc/passwd", "etc/passwd"),
        ("/escape/passwd", "etc/passwd"),
        ("//lib/./modules//", "usr/lib/modules"),
        ("/absent/below/../x", "absent/x"),
        ("/", "."),
    ],
)
def test_links_stay_inside(tmp_path: Path, asked: str, found: str) -> None:
    make_tree(
        tmp_path,
        {
            "/usr/lib/modules/R/build": Link("/usr/src/headers"),
            "/lib": Link("usr/lib"),
            "/usr/src/headers/Makefile": "",
            "/escape": Link("../../../../../../etc"),
            "/etc/passwd": "ours",
        },
    )
    assert resolve_in_root(tmp_path, asked) == tmp_path / found


def test_last_link_can_be_left_alone(tmp_path: Path) -> None:
    make_tree(tmp_path, {"/d": Link("/real"), "/real/link": Link("/etc/passwd")})
    host = LocalHost(tmp_path)
    assert host.path("/d/link/", follow=False) == tmp_path / "real/link"
    assert host.path("/d/link") == tmp_path / "etc/passwd"
    assert host.inside(host.path("/d/link", follow=False)) == "/real/link"


def test_loop(tmp_path: Path) -> None:
    make_tree(tmp_path, {"/a": Link("b"), "/b": Link("/a")})
    with pytest.raises(OSError, match="symbolic links"):
        resolve_in_root(tmp_path, "/a/x")
