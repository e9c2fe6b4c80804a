"""What the machine lacks is found before a build starts, with a code and a remedy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpuguard.build.inputs import InputsProbe
from gpuguard.config import SigningConfig
from gpuguard.core.facts import HeadersState, SecureBootFacts, SecureBootState
from gpuguard.demo.source import VERSION
from gpuguard.errors import PreflightError
from tests.building import (
    Workplace,
    a_kernel,
    codes,
    configured,
    look,
    needs_root,
    small_disk,
)


def test_nothing_stands_in_the_way_of_a_complete_machine(workplace: Workplace) -> None:
    inputs = look(workplace)
    assert codes(inputs) == []
    assert [key for key, _ in inputs.inputs] == [
        "compiler", "driver_version", "headers", "modules", "patches", "signing", "signing_key",
        "source", "timeout_seconds",
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


def test_driver_version_is_not_known(workplace: Workplace) -> None:
    assert codes(look(workplace, version=None)) == ["driver-version-unknown"]


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
    inputs = InputsProbe(workplace.host, config, VERSION, facts).for_kernel(kernel)
    assert codes(inputs) == ([code] if code else [])


def test_a_tool_where_modules_must_be_signed(workplace: Workplace, tools: Path) -> None:
    compiler(tools, "gcc-13", "13.3.0")
    for name in ("mok.key", "mok.pub"):
        (workplace.root / "srv" / name).write_text("key")
    facts = SecureBootFacts(
        state=SecureBootState.ON, key="/srv/mok.key", certificate="/srv/mok.pub"
    )
    kernel = a_kernel(headers={**BY_GCC_13, "module_signing": True})
    inputs = InputsProbe(workplace.host, configured(), VERSION, facts).for_kernel(kernel)
    assert codes(inputs) == ["signing-tool-missing"]
    compiler(tools, "kmodsign", "1.0")
    inputs = InputsProbe(workplace.host, configured(), VERSION, facts).for_kernel(kernel)
    assert codes(inputs) == []
