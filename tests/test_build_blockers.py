"""What stands in a build's way is found before it starts, each with a code and a remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuguard.build.inputs import probe_inputs
from gpuguard.build.records import BuildInputs
from gpuguard.config import Config, SigningConfig
from gpuguard.core.facts import HeadersState, KernelFacts, SecureBootFacts, SecureBootState
from gpuguard.demo.source import VERSION
from gpuguard.errors import ConfigError, PatchRejectedError, PreflightError
from tests.building import (
    OWNER,
    PATCH,
    SOURCE,
    Workplace,
    a_kernel,
    configured,
    gcc_text,
    git,
    make_clone,
    needs_root,
)


def look(
    place: Workplace,
    config: Config | None = None,
    kernel: KernelFacts | None = None,
    version: str | None = VERSION,
) -> BuildInputs:
    return place.inputs(config or configured(), kernel or a_kernel(), version)


def codes(inputs: BuildInputs) -> list[str]:
    assert all(blocker.hint and blocker.message for blocker in inputs.blockers)
    return [blocker.code for blocker in inputs.blockers]


def test_nothing_stands_in_the_way_of_a_complete_machine(workplace: Workplace) -> None:
    inputs = look(workplace)
    assert codes(inputs) == []
    assert [key for key, _ in inputs.inputs] == [
        "compiler", "driver_version", "headers", "patches", "source",
    ]  # fmt: skip
    assert all(value for _, value in inputs.inputs)


def test_looking_changes_nothing(workplace: Workplace) -> None:
    def state() -> dict[str, tuple[int, int]]:
        found = [workplace.root, *workplace.root.rglob("*")]
        return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in found}

    before = state()
    look(workplace)
    assert state() == before


@pytest.mark.parametrize(
    ("headers", "code", "in_message"),
    [
        ({"state": HeadersState.MISSING, "missing": ("build is dangling",)}, "headers-missing",
         "dangling"),
        ({"state": HeadersState.INCOMPLETE, "missing": ("Makefile",)}, "headers-incomplete",
         "lack Makefile"),
        ({"release": "6.1.0-47-amd64", "state": HeadersState.INCOMPLETE}, "headers-wrong-kernel",
         "is for 6.1.0-47-amd64"),
        ({"architecture": "arm64"}, "architecture-mismatch", "arm64"),
    ],
)  # fmt: skip
def test_headers(workplace: Workplace, headers: dict[str, Any], code: str, in_message: str) -> None:
    inputs = look(workplace, kernel=a_kernel(headers=headers))
    assert codes(inputs) == [code]
    assert in_message in inputs.blockers[0].message


def test_missing_headers_name_the_package(workplace: Workplace) -> None:
    blocker = look(workplace, kernel=a_kernel(headers={"state": HeadersState.MISSING})).blockers[0]
    assert "apt-get install linux-headers-6.1.0-50-amd64" in blocker.hint
    assert isinstance(blocker.error(), PreflightError)
    assert blocker.error().exit_status == os.EX_UNAVAILABLE


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of this test's own: everything that a build needs but compilers."""
    for name in ("patch", "make", "strip", "tar", "git", "setpriv", "xz"):
        found = shutil.which(name)
        assert found
        (tmp_path / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def compiler(tools: Path, name: str, version: str) -> None:
    script = tools / name
    script.write_text(f"#!/bin/sh\necho '{name} (Test {version}) {version}'\n")
    script.chmod(0o755)


BY_GCC_13 = {"compiler": "x86_64-linux-gnu-gcc-13 (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0"}


def test_another_major_is_refused_and_the_package_is_named(
    workplace: Workplace, tools: Path
) -> None:
    compiler(tools, "gcc", "12.2.0")
    compiler(tools, "gcc-12", "12.2.0")
    inputs = look(workplace, kernel=a_kernel(headers=BY_GCC_13))
    assert codes(inputs) == ["compiler-mismatch"]
    assert "gcc-13" in inputs.blockers[0].hint
    assert inputs.compiler is None


def test_no_compiler_at_all(workplace: Workplace, tools: Path) -> None:
    assert codes(look(workplace, kernel=a_kernel(headers=BY_GCC_13))) == ["compiler-missing"]


@pytest.mark.parametrize("name", ["gcc-13", "x86_64-linux-gnu-gcc-13", "gcc"])
def test_the_right_major_is_found_under_any_name(
    workplace: Workplace, tools: Path, name: str
) -> None:
    compiler(tools, "gcc", "12.2.0")
    compiler(tools, name, "13.3.0")
    inputs = look(workplace, kernel=a_kernel(headers=BY_GCC_13))
    assert codes(inputs) == []
    assert inputs.compiler is not None
    assert (inputs.compiler.cc, inputs.compiler.major) == (name, 13)
    assert inputs.compiler.remark == ""


def test_another_minor_is_used_and_told(workplace: Workplace, tools: Path) -> None:
    compiler(tools, "gcc-13", "13.1.0")
    inputs = look(workplace, kernel=a_kernel(headers=BY_GCC_13))
    assert codes(inputs) == []
    assert inputs.compiler is not None
    assert inputs.compiler.remark == "kernel compiled by 13.3.0, this is 13.1.0"


@pytest.mark.parametrize("text", ["clang version 16.0.6", "Debian clang version 14.0.6", None])
def test_a_kernel_that_gcc_did_not_compile(workplace: Workplace, text: str | None) -> None:
    assert codes(look(workplace, kernel=a_kernel(headers={"compiler": text}))) == [
        "compiler-mismatch"
    ]


def test_cxx_sources_take_a_cxx_compiler_of_that_major(workplace: Workplace, tools: Path) -> None:
    compiler(tools, "gcc-13", "13.3.0")
    compiler(tools, "g++", "12.2.0")
    (workplace.source / "src/common.cpp").write_text("class A {};\n")
    inputs = look(workplace, kernel=a_kernel(headers=BY_GCC_13))
    assert codes(inputs) == ["compiler-missing"]
    assert "g++-13" in inputs.blockers[0].hint
    compiler(tools, "g++-13", "13.3.0")
    assert codes(look(workplace, kernel=a_kernel(headers=BY_GCC_13))) == []


def test_programs_that_a_build_calls(workplace: Workplace, tools: Path) -> None:
    compiler(tools, "gcc-13", "13.3.0")
    (tools / "patch").unlink()
    (tools / "xz").unlink()
    inputs = look(workplace, kernel=a_kernel(headers=BY_GCC_13, suffix=".xz"))
    assert codes(inputs) == ["program-missing", "program-missing"]
    assert "xz-utils" in inputs.blockers[1].hint


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


def test_driver_version_is_not_known(workplace: Workplace) -> None:
    assert codes(look(workplace, version=None)) == ["driver-version-unknown"]


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
    assert f"source.trusted_owner: {OWNER}" in inputs.blockers[0].hint
    assert codes(look(workplace, configured(ref=ref, patches=(), trusted_owner=OWNER))) == []


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


@needs_root
@pytest.mark.parametrize("name", ["no-such-account", "root"])
def test_build_user(workplace: Workplace, name: str) -> None:
    inputs = look(workplace, configured(user=name))
    assert codes(inputs) == ["build-user-missing"]
    assert "useradd --system" in inputs.blockers[0].hint


@needs_root
def test_a_tree_that_the_build_user_may_not_enter(workplace: Workplace) -> None:
    (workplace.root / "var").chmod(0o700)
    inputs = look(workplace)
    assert codes(inputs) == ["staging-unreachable"]
    assert str(workplace.root / "var") in inputs.blockers[0].message


@needs_root
@pytest.mark.parametrize("folder", ["var/cache", "lib/modules"])
def test_too_little_room(workplace: Workplace, folder: str) -> None:
    with small_disk(workplace.root / folder, "4M"):
        inputs = look(workplace)
    assert codes(inputs) == ["disk-space"]
    assert "4 MiB free" in inputs.blockers[0].message


class small_disk:  # noqa: N801 - reads like open()
    def __init__(self, folder: Path, size: str) -> None:
        self.folder, self.size = folder, size

    def __enter__(self) -> None:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={self.size},mode=755", "tmpfs", self.folder],
            check=True,
        )

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", self.folder], check=True)


def test_a_compression_that_is_not_known(workplace: Workplace) -> None:
    assert codes(look(workplace, kernel=a_kernel(suffix=".br"))) == ["compression-unknown"]


@pytest.mark.parametrize(
    ("mode", "state", "code"),
    [
        ("auto", SecureBootState.ON, "signing-key-missing"),
        ("never", SecureBootState.ON, "signing-key-missing"),
        ("always", SecureBootState.OFF, "signing-key-missing"),
        ("auto", SecureBootState.OFF, None),
        ("never", SecureBootState.OFF, None),
        ("auto", SecureBootState.UNKNOWN, None),
    ],
)
def test_a_key_where_modules_must_be_signed(
    workplace: Workplace, mode: str, state: SecureBootState, code: str | None
) -> None:
    config = configured(signing=SigningConfig(mode=mode))  # type: ignore[arg-type]
    kernel = a_kernel(headers={"module_signing": True})
    facts = SecureBootFacts(state=state, key="/var/lib/dkms/mok.key")
    inputs = probe_inputs(workplace.host, config, kernel, VERSION, facts)
    assert codes(inputs) == ([code] if code else [])


def test_a_tool_where_modules_must_be_signed(workplace: Workplace, tools: Path) -> None:
    compiler(tools, "gcc-13", "13.3.0")
    for name in ("mok.key", "mok.pub"):
        (workplace.root / "srv" / name).write_text("key")
    facts = SecureBootFacts(
        state=SecureBootState.ON, key="/srv/mok.key", certificate="/srv/mok.pub"
    )
    kernel = a_kernel(headers={**BY_GCC_13, "module_signing": True})
    inputs = probe_inputs(workplace.host, configured(), kernel, VERSION, facts)
    assert codes(inputs) == ["signing-tool-missing"]
    compiler(tools, "kmodsign", "1.0")
    inputs = probe_inputs(workplace.host, configured(), kernel, VERSION, facts)
    assert codes(inputs) == []


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


def chown_tree(folder: Path) -> None:
    subprocess.run(["chown", "-R", f"{OWNER}:{OWNER}", folder], check=True)
