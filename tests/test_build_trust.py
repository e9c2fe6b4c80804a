"""Root believes a source, patch or key only if nobody else can change it, or the way to it."""

from __future__ import annotations

import os
import pwd
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gpuguard.build.repository import find
from gpuguard.build.source import export, probe
from gpuguard.build.staging import staging
from gpuguard.build.trust import trust_in
from gpuguard.config import Config
from gpuguard.demo.source import VERSION
from gpuguard.errors import BuildError, ConfigError, ProbeError
from gpuguard.host.files import writable_by_others
from tests.building import (
    OWNER,
    PATCH,
    SOURCE,
    Workplace,
    a_kernel,
    chown_tree,
    codes,
    configured,
    git,
    look,
    make_clone,
    needs_root,
)

REF = f"{VERSION}-p2p"


def at_ref(trusted_owner: str | None = None) -> Config:
    config = configured(ref=REF, patches=(), trusted_owner=trusted_owner)
    return replace(config, source=replace(config.source, already_patched=True))


AT_REF, TRUSTING = at_ref(), at_ref(OWNER)


def give_away(path: Path) -> None:
    os.chown(path, pwd.getpwnam(OWNER).pw_uid, -1, follow_symlinks=False)


def their_home(place: Workplace) -> Path:
    home = place.root / "home/daemon"
    home.mkdir(parents=True)
    give_away(home)
    return home


def exported_text(place: Workplace, config: Config, name: str) -> str:
    found = probe(place.host, config.source, VERSION)
    assert found.blockers == ()
    with staging(place.host, "6.1.0-50-amd64", None) as here:
        export(place.host, found.state, here)
        return (here.tree / name).read_text()


def worktree_of_theirs(place: Workplace) -> Path:
    """What root gets from ``git worktree add`` in a clone of somebody else's."""
    make_clone(place)
    (place.source / ".gitattributes").write_text("version.mk filter=who\n")
    git(place.source, "add", "--all")
    git(place.source, "commit", "--quiet", "--message=filter")
    git(place.source, "tag", "--force", REF)
    clone = place.root / "home/daemon/clone"
    clone.parent.mkdir(parents=True)
    place.source.rename(clone)
    git(clone, "worktree", "add", "--quiet", "--detach", str(place.source), REF)
    git(clone, "config", "filter.who.smudge", "id -un; cat")
    chown_tree(clone.parent)
    return clone


@needs_root
def test_a_worktree_of_somebody_elses_clone(workplace: Workplace) -> None:
    clone = worktree_of_theirs(workplace)
    found = look(workplace, AT_REF)
    assert codes(found) == ["source-untrusted"]
    assert f"{clone}/.git" in found.blockers[0].message


@needs_root
@pytest.mark.parametrize("roots", ["nothing", "worktree", "all but the configuration"])
def test_what_a_trusted_owner_may_write_is_not_obeyed_by_root(
    workplace: Workplace, roots: str
) -> None:
    clone = worktree_of_theirs(workplace)
    if roots == "worktree":
        subprocess.run(["chown", "-R", "root:root", clone / ".git/worktrees"], check=True)
    elif roots.startswith("all"):
        subprocess.run(["chown", "-R", "root:root", clone.parent], check=True)
        give_away(clone / ".git/config")
    assert exported_text(workplace, TRUSTING, "version.mk").startswith(f"{OWNER}\n")


@needs_root
@pytest.mark.parametrize("depth", [1, 2])
def test_objects_borrowed_from_somebody_elses_clone(workplace: Workplace, depth: int) -> None:
    make_clone(workplace)
    theirs = workplace.source.with_name("theirs")
    workplace.source.rename(theirs)
    lender = theirs
    for number in range(depth):
        target = workplace.source if number == depth - 1 else theirs.with_name("between")
        git(workplace.root, "clone", "--quiet", "--shared", str(lender), str(target))
        lender = target
    assert probe(workplace.host, AT_REF.source, VERSION).blockers == ()
    chown_tree(theirs)
    assert codes(look(workplace, AT_REF)) == ["source-untrusted"]
    assert "RM_P2P_OK;" in exported_text(workplace, TRUSTING, "src/nvidia/src/p2p_policy.c")


def test_alternates_that_borrow_from_each_other(workplace: Workplace) -> None:
    make_clone(workplace)
    objects = workplace.source / ".git/objects"
    (objects / "info/alternates").write_text(f"# itself\n\n{objects}\n")
    with pytest.raises(ProbeError):
        find(workplace.source)
    assert codes(look(workplace, AT_REF)) == ["source-unreadable"]


@needs_root
@pytest.mark.parametrize("name", ["objects", "config", "refs"])
def test_a_repository_pieced_together_by_links(workplace: Workplace, name: str) -> None:
    make_clone(workplace)
    home = their_home(workplace)
    (workplace.source / ".git" / name).rename(home / name)
    (workplace.source / ".git" / name).symlink_to(home / name)
    assert codes(look(workplace, AT_REF)) == ["source-untrusted"]


@needs_root
@pytest.mark.parametrize("section", ["[include]", '[ includeIf "gitdir:/" ]'])
def test_a_configuration_that_includes_another(workplace: Workplace, section: str) -> None:
    make_clone(workplace)
    with (workplace.source / ".git/config").open("a") as file:
        file.write(f"{section}\n\tpath = /home/daemon/config\n")
    assert codes(look(workplace, AT_REF)) == ["source-untrusted"]


@needs_root
def test_a_link_that_others_can_turn(workplace: Workplace) -> None:
    good = workplace.source.with_name("good")
    workplace.source.rename(good)
    home = their_home(workplace)
    (home / "nv").symlink_to("/srv/good")
    workplace.source.symlink_to("/home/daemon/nv")
    found = look(workplace)
    assert codes(found) == ["source-untrusted"]
    assert "/home/daemon" in found.blockers[0].message
    (home / "p.patch").symlink_to(PATCH)
    assert codes(look(workplace, configured(patches=("/home/daemon/p.patch",)))) == [
        "source-untrusted", "patch-untrusted",
    ]  # fmt: skip


@needs_root
def test_a_clone_that_is_another_one_when_it_is_copied(workplace: Workplace) -> None:
    make_clone(workplace)
    found = probe(workplace.host, AT_REF.source, VERSION)
    original = workplace.source.with_name("original")
    workplace.source.rename(original)
    git(workplace.root, "clone", "--quiet", "--bare", str(original), str(workplace.source))
    with (
        staging(workplace.host, "6.1.0-50-amd64", None) as here,
        pytest.raises(BuildError) as caught,
    ):
        export(workplace.host, found.state, here)
    assert caught.value.code == "source-changed"


@needs_root
def test_each_folder_link_and_file_on_the_way_counts(tmp_path: Path) -> None:
    for folder in ("etc", "srv", "home"):
        (tmp_path / folder).mkdir()
    (tmp_path / "srv/file").write_text("")
    (tmp_path / "etc/link").symlink_to("../home/link")
    (tmp_path / "home/link").symlink_to("/srv/file")  # inside the root
    link = tmp_path / "etc/link"
    assert writable_by_others(link, root=tmp_path) is None
    for name in ("etc", "home", "srv", "etc/link", "home/link", "srv/file"):
        give_away(tmp_path / name)
        reason = writable_by_others(link, root=tmp_path)
        assert reason is not None
        assert reason.startswith(f"{tmp_path / name} is owned by uid ")
        os.chown(tmp_path / name, 0, 0, follow_symlinks=False)
    (tmp_path / "home/link").unlink()
    with pytest.raises(FileNotFoundError):
        writable_by_others(link, root=tmp_path)
    assert writable_by_others(link, root=tmp_path, missing_ok=True) is None
    (tmp_path / "home").chmod(0o1777)  # whoever comes first may put it there
    assert writable_by_others(link, root=tmp_path, missing_ok=True) is not None
    (tmp_path / "home/link").symlink_to("../etc/link")
    with pytest.raises(OSError, match="symbolic links"):
        writable_by_others(link, root=tmp_path)


@needs_root
def test_a_configuration_behind_a_link_that_others_can_turn(workplace: Workplace) -> None:
    from gpuguard.config_file import load_config

    home = their_home(workplace)
    (workplace.root / "etc/gpuguard").mkdir(parents=True)
    (workplace.root / "srv/good.yaml").write_text(f"source: {{path: {SOURCE}}}\n")
    (home / "g.yaml").symlink_to("/srv/good.yaml")
    file = workplace.root / "etc/gpuguard/gpuguard.yaml"
    file.symlink_to("/home/daemon/g.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(workplace.host)
    assert caught.value.code == "config-untrusted"
    assert caught.value.hint == f"chown root:root {home} && chmod go-w {home}"
    os.chown(home, 0, 0)
    give_away(home / "g.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(workplace.host)
    subprocess.run(["sh", "-c", caught.value.hint], check=True)
    assert load_config(workplace.host).source.path == SOURCE


@pytest.mark.parametrize("ref", [None, REF])
@pytest.mark.parametrize("target", ["/etc/passwd", "../../elsewhere", "d/up/../x"])
def test_a_link_out_of_the_source(workplace: Workplace, target: str, ref: str | None) -> None:
    if "up" in target:  # no part of it leads out, the whole does
        (workplace.source / "kernel-open/d").mkdir()
        (workplace.source / "kernel-open/d/up").symlink_to("../..")
    (workplace.source / "kernel-open/link.c").symlink_to(target)
    make_clone(workplace)
    config = configured() if ref is None else AT_REF
    if "up" in target and ref is not None:  # seen in the export
        with pytest.raises(BuildError) as caught:
            exported_text(workplace, config, "version.mk")
        assert caught.value.code == "source-link-outside"
    else:
        found = look(workplace, config)
        assert codes(found) == ["source-link-outside"]
        assert f"kernel-open/link.c -> {target}" in found.blockers[0].message


def test_a_link_within_the_source(workplace: Workplace) -> None:
    (workplace.source / "kernel-open/link.c").symlink_to("../version.mk")
    assert codes(look(workplace)) == []


@needs_root
def test_a_uid_without_an_account_may_be_trusted_by_number() -> None:
    trust = trust_in("54321")
    assert trust.uids == {0, 54321}
    with pytest.raises(KeyError):
        trust_in("no-such-account")


@needs_root
@pytest.mark.parametrize("what", ["folder", "link on the way", "script", "behind a link", "source"])
def test_headers_that_others_can_write(workplace: Workplace, what: str) -> None:
    """They are compiled in, and their scripts run. Debian's lie in three places."""
    root, release = workplace.root, "6.1.0-50-amd64"
    output, common = root / f"usr/src/linux-headers-{release}", root / "usr/src/common"
    kbuild = root / "usr/lib/linux-kbuild-6.1/scripts"
    for folder in (output, common, kbuild, root / f"lib/modules/{release}"):
        folder.mkdir(parents=True)
    (kbuild / "modpost").write_text("")
    (output / "scripts").symlink_to("/usr/lib/linux-kbuild-6.1/scripts")
    (output / "dangling").symlink_to("/usr/lib/no-such")
    (root / f"lib/modules/{release}/build").symlink_to(f"/usr/src/linux-headers-{release}")
    kernel = a_kernel(release, headers={"source_dir": "/usr/src/common"})
    assert codes(look(workplace, kernel=kernel)) == []
    changed = {
        "folder": output,
        "link on the way": root / f"lib/modules/{release}/build",
        "script": kbuild / "modpost",
        "behind a link": root / "usr/lib/linux-kbuild-6.1",
        "source": common,
    }
    give_away(changed[what])
    found = look(workplace, kernel=kernel)
    assert codes(found) == ["headers-untrusted"]
    assert str(changed[what]) in found.blockers[0].message
    trusting = configured(trusted_owner=OWNER)
    assert codes(look(workplace, trusting, kernel=kernel)) == []
