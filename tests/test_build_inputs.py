"""Source and patches: what is refused before a build starts, and what makes one due."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from gpuguard.build.records import BuildInputs
from gpuguard.config import SigningConfig
from gpuguard.core.facts import MODULE_NAMES
from gpuguard.demo.source import VERSION
from gpuguard.errors import ConfigError, PatchRejectedError
from tests.building import (
    OWNER,
    PATCH,
    SOURCE,
    Workplace,
    a_kernel,
    chown_tree,
    codes,
    configured,
    gcc_text,
    git,
    look,
    make_clone,
    needs_root,
)


def test_source_is_not_there(workplace: Workplace) -> None:
    shutil.rmtree(workplace.source)
    inputs = look(workplace)
    assert codes(inputs) == ["source-missing"]
    assert isinstance(inputs.blockers[0].error(), ConfigError)


@pytest.mark.parametrize("lacking", ["version.mk", "kernel-open", "src/nvidia"])
def test_a_folder_that_is_not_the_source(workplace: Workplace, lacking: str) -> None:
    path = workplace.source / lacking
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    inputs = look(workplace)
    assert codes(inputs) == ["source-not-a-source"]
    assert lacking in inputs.blockers[0].message


def test_version_mk_without_a_version(workplace: Workplace) -> None:
    (workplace.source / "version.mk").write_text("# nothing\n")
    assert codes(look(workplace)) == ["source-not-a-source"]


def test_versions_are_compared_to_the_last_number(workplace: Workplace) -> None:
    (workplace.source / "version.mk").write_text("NVIDIA_VERSION = 570.124.06\n")
    inputs = look(workplace, version="570.124.04")
    assert codes(inputs) == ["source-version-mismatch"]
    assert "570.124.06" in inputs.blockers[0].message
    assert "570.124.04" in inputs.blockers[0].message


def test_a_ref_that_does_not_exist_shows_near_ones(workplace: Workplace) -> None:
    make_clone(workplace)
    inputs = look(workplace, configured(ref="{driver_version}-p2q", patches=()))
    assert codes(inputs) == ["source-ref-missing"]
    assert f"{VERSION}-p2p" in inputs.blockers[0].hint


def test_a_ref_that_looks_like_an_option(workplace: Workplace) -> None:
    make_clone(workplace)
    assert codes(look(workplace, configured(ref="--help"))) == ["source-ref-missing"]


def test_a_ref_in_a_folder_that_is_no_clone(workplace: Workplace) -> None:
    assert codes(look(workplace, configured(ref="main"))) == ["source-ref-missing"]


def test_a_ref_that_is_the_stock_one(workplace: Workplace) -> None:
    make_clone(workplace)
    stock = configured(ref="{driver_version}", stock_ref="{driver_version}", patches=())
    assert codes(look(workplace, stock)) == ["source-not-patched"]
    patched = configured(ref="{driver_version}-p2p", stock_ref="{driver_version}", patches=())
    assert codes(look(workplace, patched)) == []


def test_a_damaged_clone_is_not_a_missing_ref(workplace: Workplace) -> None:
    make_clone(workplace)
    shutil.rmtree(workplace.source / ".git/refs")
    inputs = look(workplace, configured(ref=VERSION))
    assert codes(inputs) == ["source-unreadable"]


def test_patches(workplace: Workplace) -> None:
    folder = workplace.patch.parent
    (folder / "empty.patch").write_text("")
    (folder / "page.patch").write_text("<html>404 @@ not found</html>\n")
    config = configured(
        patches=(
            PATCH, "/srv/patches/none.patch", "/srv/patches/{driver_version}/*.patch",
            "/srv/patches/[ep]*.patch", "relative.patch",
        )
    )  # fmt: skip
    inputs = look(workplace, config)
    assert [patch.path for patch in inputs.patches] == [PATCH, PATCH]
    assert codes(inputs) == [
        "patch-missing", "patch-missing", "patch-empty", "patch-empty", "patch-missing",
    ]  # fmt: skip
    assert VERSION in inputs.blockers[1].message
    assert isinstance(inputs.blockers[2].error(), PatchRejectedError)
    assert inputs.blockers[2].error().exit_status == os.EX_DATAERR


@needs_root
@pytest.mark.parametrize("name", ["", "kernel-open", "version.mk", "src/nvidia/src/rm_core.c"])
def test_root_compiles_nothing_that_others_can_write(workplace: Workplace, name: str) -> None:
    path = workplace.source / name
    path.chmod(path.stat().st_mode | 0o002)
    inputs = look(workplace)
    assert codes(inputs) == ["source-untrusted"]
    hint = inputs.blockers[0].hint
    assert "chown" in hint
    assert "trusted_owner" in hint
    assert inputs.blockers[0].error().exit_status == os.EX_CONFIG


@needs_root
@pytest.mark.parametrize("ref", [None, VERSION])
def test_somebody_elses_source_takes_a_word_of_trust(workplace: Workplace, ref: str | None) -> None:
    make_clone(workplace)
    chown_tree(workplace.source)
    inputs = look(workplace, configured(ref=ref, patches=()))
    assert codes(inputs) == ["source-untrusted"]
    assert f'source.trusted_owner: "{OWNER}"' in inputs.blockers[0].hint
    trusting = configured(ref=ref, patches=(), trusted_owner=OWNER)
    assert codes(look(workplace, trusting)) == ["source-not-patched"]  # looked into, at last


@needs_root
def test_the_trusted_owners_private_group_may_write(workplace: Workplace) -> None:
    """Ubuntu's umask is 002, and each account has a group of its own."""
    chown_tree(workplace.source)
    subprocess.run(["chmod", "-R", "g+w", workplace.source], check=True)
    assert codes(look(workplace, configured(trusted_owner=OWNER))) == []
    subprocess.run(["chgrp", "-R", "users", workplace.source], check=True)
    assert codes(look(workplace, configured(trusted_owner=OWNER))) == ["source-untrusted"]


@needs_root
def test_a_writable_git_directory(workplace: Workplace) -> None:
    make_clone(workplace)
    (workplace.source / ".git/refs/tags").chmod(0o777)
    inputs = look(workplace, configured(ref=VERSION, patches=()))
    assert codes(inputs) == ["source-untrusted"]


@needs_root
def test_a_trusted_owner_that_does_not_exist(workplace: Workplace) -> None:
    inputs = look(workplace, configured(trusted_owner="no-such-account"))
    assert codes(inputs) == ["source-untrusted"]


@needs_root
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_patch_that_others_can_write(workplace: Workplace, what: str) -> None:
    path = workplace.patch if what == "file" else workplace.patch.parent
    path.chmod(path.stat().st_mode | 0o022)
    inputs = look(workplace)
    assert codes(inputs) == ["patch-untrusted"]
    assert inputs.patches == ()


def test_each_input_makes_a_rebuild_due(workplace: Workplace) -> None:
    first = dict(look(workplace).inputs)

    def changed(inputs: BuildInputs) -> set[str]:
        return {key for key, value in inputs.inputs if first[key] != value}

    assert changed(look(workplace)) == set()
    assert changed(look(workplace, kernel=a_kernel(headers={"fingerprint": "0" * 64}))) == {
        "headers"
    }
    assert changed(look(workplace, configured(patches=()))) == {"patches"}
    assert changed(look(workplace, configured(patches=(PATCH, PATCH)))) == {"patches"}
    file = workplace.source / "src/nvidia/src/rm_core.c"
    file.write_text(file.read_text() + "\n")
    assert changed(look(workplace)) == {"source"}


def test_what_a_build_left_in_the_folder_is_not_source(workplace: Workplace) -> None:
    before = look(workplace).inputs
    for name in (
        "src/nvidia/_out/Linux_x86_64/nv-kernel.o", "kernel-open/conftest/headers.h",
        "kernel-open/nvidia/nv.o", "kernel-open/nvidia/.nv.o.cmd", "kernel-open/nvidia.ko",
        "kernel-open/nvidia.mod.c", "kernel-open/nvidia.mod", "kernel-open/Module.symvers",
        "kernel-open/modules.order", "kernel-open/nvidia/nv-kernel.o_binary", ".git/HEAD",
    ):  # fmt: skip
        (workplace.source / name).parent.mkdir(parents=True, exist_ok=True)
        (workplace.source / name).write_text("built")
    assert look(workplace).inputs == before
    (workplace.source / "kernel-open/nvidia/new.c").write_text("source")
    assert look(workplace).inputs != before


def test_executable_bit_and_links_are_source_too(workplace: Workplace) -> None:
    seen = {look(workplace).inputs}
    (workplace.source / "utils.mk").chmod(0o755)
    seen.add(look(workplace).inputs)
    (workplace.source / "link").symlink_to("utils.mk")
    seen.add(look(workplace).inputs)
    (workplace.source / "link").unlink()
    (workplace.source / "link").symlink_to("version.mk")
    seen.add(look(workplace).inputs)
    assert len(seen) == 4


def test_a_clones_identity_is_its_tree(workplace: Workplace) -> None:
    make_clone(workplace)
    inputs = look(workplace, configured(ref=f"{VERSION}-p2p", patches=()))
    tree = git(workplace.source, "rev-parse", f"{VERSION}-p2p^{{tree}}").strip()
    assert dict(inputs.inputs)["source"] == f"git:{tree}"
    (workplace.source / "version.mk").write_text("uncommitted")
    assert look(workplace, configured(ref=f"{VERSION}-p2p", patches=())).inputs == inputs.inputs


def test_the_compilers_name_is_not_its_identity(workplace: Workplace) -> None:
    text = gcc_text()
    other = f"no-such-gcc {text.split(' ', 1)[1]}"
    assert (
        look(workplace, kernel=a_kernel(headers={"compiler": other})).inputs
        == look(workplace).inputs
    )


def test_source_path_is_told_in_messages(workplace: Workplace) -> None:
    shutil.rmtree(workplace.source)
    assert SOURCE in look(workplace).blockers[0].message


def test_what_is_only_a_reason_to_try_again(workplace: Workplace) -> None:
    """More time or a mended key is no reason to compile anew what was made."""
    key = workplace.root / "srv/mok.key"
    key.write_text("bad")
    signing = SigningConfig(key="/srv/mok.key", certificate="/srv/mok.der")
    before = look(workplace, configured(signing=signing))
    assert list(before.inputs) == sorted(before.inputs)
    key.write_text("mended")
    mended = look(workplace, configured(signing=signing))
    slow = look(workplace, configured(signing=signing, timeout_seconds=7200))
    for after, keys in ((mended, {"signing_key"}), (slow, {"signing_key", "timeout_seconds"})):
        changed = {k for k, v in after.inputs if dict(before.inputs)[k] != v}
        assert changed == keys
        assert after.lasting == before.lasting


def test_modules_and_the_wish_for_signatures_last(workplace: Workplace) -> None:
    before = look(workplace).lasting
    assert look(workplace, configured(modules=MODULE_NAMES[::-1])).lasting == before
    fewer = look(workplace, configured(modules=("nvidia",))).lasting
    never = look(workplace, configured(signing=SigningConfig(mode="never"))).lasting
    assert {k for k, v in fewer if dict(before)[k] != v} == {"modules"}
    assert {k for k, v in never if dict(before)[k] != v} == {"signing"}
