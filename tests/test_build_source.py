"""The operator's clone or folder is copied, never touched, and read as its owner."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuguard.build import products
from gpuguard.build.inputs import build_user
from gpuguard.build.records import SourceState
from gpuguard.build.source import export, probe
from gpuguard.build.staging import Staging, remove_stale, staging
from gpuguard.config import Config
from gpuguard.demo.source import VERSION
from gpuguard.errors import BuildError
from tests.building import (
    OWNER,
    USER,
    Workplace,
    as_account,
    configured,
    git,
    make_clone,
    needs_root,
)


def everything(folder: Path) -> dict[str, tuple[object, ...]]:
    """Each entry's mode, owner, times of content and inode, and content."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (
            status.st_mode, status.st_uid, status.st_mtime_ns, status.st_ctime_ns,
            hashlib.sha256(content).hexdigest(),
        )  # fmt: skip
    return found


@contextmanager
def exported(place: Workplace, config: Config) -> Iterator[Path]:
    found = probe(place.host, config.source, VERSION)
    assert found.blockers == ()
    user = build_user(config)
    with staging(place.host, "6.1.0-50-amd64", user) as here:
        export(place.host, found.state, here)
        yield here.tree


def files(tree: Path) -> set[str]:
    return {str(p.relative_to(tree)) for p in tree.rglob("*") if not p.is_dir()}


def test_a_folder_is_exported_as_it_stands(workplace: Workplace) -> None:
    (workplace.source / "link").symlink_to("src/nvidia")
    (workplace.source / "-n").write_text("a name like an option")
    (workplace.source / "new\nline").write_text("a name with a newline")
    (workplace.source / "utils.mk").chmod(0o755)
    before = everything(workplace.source)
    with exported(workplace, configured()) as tree:
        assert files(tree) == files(workplace.source)
        assert (tree / "link").readlink() == Path("src/nvidia")
        assert (tree / "utils.mk").stat().st_mode & 0o777 == 0o755
        assert (tree / "-n").read_text() == "a name like an option"
    assert everything(workplace.source) == before
    assert workplace.staging == []


def test_build_products_stay_behind(workplace: Workplace) -> None:
    built = [
        "src/nvidia/_out/Linux_x86_64/nv-kernel.o", "kernel-open/nvidia/nv.o",
        "kernel-open/nvidia.ko", "kernel-open/conftest/headers.h", "kernel-open/modules.order",
        "kernel-open/nvidia/nv-kernel.o_binary", "kernel-open/.nvidia.ko.cmd",
    ]  # fmt: skip
    clean = files(workplace.source)
    for name in built:
        (workplace.source / name).parent.mkdir(parents=True, exist_ok=True)
        (workplace.source / name).write_text("stale")
    with exported(workplace, configured()) as tree:
        assert files(tree) == clean


def test_a_read_only_folder_can_be_patched_and_compiled_in(workplace: Workplace) -> None:
    subprocess.run(["chmod", "-R", "a-w", workplace.source], check=True)
    with exported(workplace, configured()) as tree:
        assert all(p.stat().st_mode & 0o200 for p in tree.rglob("*"))
    subprocess.run(["chmod", "-R", "u+w", workplace.source], check=True)


@needs_root
def test_the_export_belongs_to_the_build_user(workplace: Workplace) -> None:
    user = build_user(configured())
    assert user is not None
    with exported(workplace, configured()) as tree:
        assert {p.lstat().st_uid for p in (tree, *tree.rglob("*"))} == {user.uid}


def test_a_folder_that_changes_meanwhile(workplace: Workplace) -> None:
    config = configured()
    found = probe(workplace.host, config.source, VERSION)
    (workplace.source / "utils.mk").write_text("changed")
    user = build_user(config)
    with (
        staging(workplace.host, "6.1.0-50-amd64", user) as here,
        pytest.raises(BuildError) as caught,
    ):
        export(workplace.host, found.state, here)
    assert caught.value.code == "source-changed"


@pytest.mark.parametrize("ref", [VERSION, f"{VERSION}-p2p", "HEAD~1"])
def test_a_clone_is_exported_at_its_ref(workplace: Workplace, ref: str) -> None:
    make_clone(workplace)
    (workplace.source / "version.mk").write_text("not committed")
    with exported(workplace, configured(ref=ref, patches=())) as tree:
        text = (tree / "src/nvidia/src/p2p_policy.c").read_text()
        assert ("RM_P2P_OK;" in text) == (ref == f"{VERSION}-p2p")
        assert VERSION in (tree / "version.mk").read_text()
        assert not (tree / ".git").exists()


def test_a_bare_clone_and_a_worktree(workplace: Workplace) -> None:
    make_clone(workplace)
    original = workplace.source.with_name("original")
    workplace.source.rename(original)
    config = configured(ref=VERSION, patches=())
    git(original.parent, "clone", "--quiet", "--bare", str(original), str(workplace.source))
    with exported(workplace, config) as tree:
        bare = files(tree)
    shutil.rmtree(workplace.source)
    git(original, "worktree", "add", "--quiet", str(workplace.source), VERSION)
    with exported(workplace, config) as tree:
        assert files(tree) == bare


def test_a_commit_of_the_future_is_exported_with_todays_times(workplace: Workplace) -> None:
    make_clone(workplace)
    script = "GIT_COMMITTER_DATE=2099-01-01T00:00:00Z git -c user.name=t -c user.email=t@e.invalid"
    subprocess.run(
        ["sh", "-c", f"{script} commit -q --allow-empty -m late"], cwd=workplace.source, check=True
    )
    newest = workplace.source.stat().st_mtime + 3600
    with exported(workplace, configured(ref="HEAD", patches=())) as tree:
        assert all(p.stat().st_mtime < newest for p in tree.rglob("*"))


@needs_root
def test_somebody_elses_clone_is_not_touched_and_runs_nothing(workplace: Workplace) -> None:
    """Config, hooks and helpers in the clone name a program that would leave a trace as root."""
    make_clone(workplace)
    trace = workplace.root / "trace"
    trap = workplace.source / ".git" / "trap"
    trap.write_text(f"#!/bin/sh\nid -u >> {trace}\n")
    trap.chmod(0o755)
    for key in ("core.fsmonitor", "core.pager", "core.sshCommand", "tar.tar.command",
                "alias.archive", "diff.external"):  # fmt: skip
        git(workplace.source, "config", key, str(trap))
    for hook in ("post-checkout", "post-index-change", "reference-transaction"):
        shutil.copy(trap, workplace.source / ".git/hooks" / hook)
    subprocess.run(["chown", "-R", f"{OWNER}:{OWNER}", workplace.source], check=True)
    workplace.source.chmod(0o700)
    before = everything(workplace.source)
    config = configured(ref=f"{VERSION}-p2p", patches=(), trusted_owner=OWNER)
    with exported(workplace, config) as tree:
        assert (tree / "version.mk").is_file()
    assert everything(workplace.source) == before
    assert not trace.exists()


@needs_root
def test_git_runs_as_the_clones_owner(workplace: Workplace) -> None:
    make_clone(workplace)
    subprocess.run(["chown", "-R", f"{OWNER}:{OWNER}", workplace.source], check=True)
    config = configured(ref=VERSION, patches=(), trusted_owner=OWNER)
    assert probe(workplace.host, config.source, VERSION).blockers == ()
    # A filter of its own configuration does run, with its own rights and no more
    (workplace.source / ".gitattributes").write_text("version.mk filter=who\n")
    git(workplace.source, "add", "--all", user=OWNER)
    git(workplace.source, "commit", "--quiet", "--message=filter", user=OWNER)
    git(workplace.source, "config", "filter.who.smudge", "id -un; cat", user=OWNER)
    with exported(workplace, configured(ref="HEAD", patches=(), trusted_owner=OWNER)) as tree:
        assert (tree / "version.mk").read_text().startswith(f"{OWNER}\n")


@needs_root
def test_an_ordinary_user_reads_a_clone_of_root(workplace: Workplace) -> None:
    """git says "dubious ownership" unless the repository is named outright (safe.directory)."""
    make_clone(workplace)
    config = configured(ref="HEAD", patches=())

    def look() -> str:
        found = probe(workplace.host, config.source, VERSION)
        return f"{found.state.identity} {found.blockers}"

    assert as_account(USER, look) == look()
    assert look().startswith("git:")


def test_digest_does_not_depend_on_owner_or_time(workplace: Workplace, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(workplace.source, copy, symlinks=True)
    os.utime(copy / "version.mk", (1, 1))
    digests = {products.digest(t, products.entries(t)) for t in (workplace.source, copy)}
    assert len(digests) == 1


def test_stale_folders_go_and_living_ones_stay(workplace: Workplace) -> None:
    dead = workplace.root / "var/cache/gpuguard/staging/6.1.0-50-amd64.dead"
    (dead / "tree").mkdir(parents=True)
    (dead / "tree/file").write_text("left by kill -9")
    user = build_user(configured())
    with staging(workplace.host, "6.1.0-50-amd64", user) as first:
        assert workplace.staging == [first.root]
        with staging(workplace.host, "6.1.0-50-amd64", user) as second:
            assert workplace.staging == sorted([first.root, second.root])
        assert remove_stale(first.root.parent) == ()
        assert first.tree.is_dir()
    assert workplace.staging == []


def test_a_file_where_a_staging_folder_would_be_is_left_alone(workplace: Workplace) -> None:
    parent = workplace.root / "var/cache/gpuguard/staging"
    parent.mkdir(parents=True)
    (parent / "note").write_text("mine")
    (parent / "link").symlink_to(workplace.source)
    with staging(workplace.host, "6.1.0-50-amd64", build_user(configured())) as here:
        assert isinstance(here, Staging)
    assert (parent / "note").read_text() == "mine"
    assert (workplace.source / "version.mk").is_file()


def test_export_of_a_clone_that_went_away(workplace: Workplace) -> None:
    config = configured()
    state = SourceState(path=config.source.path, ref="main", commit="0" * 40)
    user = build_user(config)
    with (
        staging(workplace.host, "6.1.0-50-amd64", user) as here,
        pytest.raises(BuildError) as caught,
    ):
        export(workplace.host, state, here)
    assert caught.value.code == "source-changed"
