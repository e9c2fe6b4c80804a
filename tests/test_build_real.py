"""Whole builds by real kbuild on the real headers of two kernels."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from gpuguard.build.records import BuildResult
from gpuguard.core.facts import MODULE_NAMES, SecureBootFacts, SecureBootState
from gpuguard.demo.headers import HeadersCache
from gpuguard.demo.source import VERSION
from gpuguard.host.elf import ElfModule, read_module
from tests.building import (
    Listener,
    RealBuild,
    Workplace,
    real_kernel,
    refused,
)
from tests.test_build_sign import make_key

STOCK_POLICY, PATCHED_POLICY = b"standin-p2p-policy=chipset-not", b"standin-p2p-policy=ok"


def elf(path: Path) -> ElfModule:
    with path.open("rb") as file:
        return read_module(file)


def test_five_modules_for_exactly_that_kernel(real_build: RealBuild) -> None:
    assert [module.name for module in real_build.result.modules] == list(MODULE_NAMES)
    for module in real_build.result.modules:
        found = elf(real_build.modules / f"{module.name}.ko")
        assert found.modinfo["vermagic"].split()[0] == real_build.kernel.release
        assert found.modinfo["version"] == VERSION
        assert found.build_id == module.build_id
    assert len({module.build_id for module in real_build.result.modules}) == 5


def test_the_patch_is_in_both_parts(real_build: RealBuild) -> None:
    content = (real_build.modules / "nvidia.ko").read_bytes()
    assert PATCHED_POLICY in content
    assert STOCK_POLICY not in content


def test_debug_information_is_stripped(real_build: RealBuild) -> None:
    sections = subprocess.run(
        ["readelf", "--sections", "--wide", real_build.modules / "nvidia.ko"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert ".note.gnu.build-id" in sections
    assert ".debug_info" not in sections


def test_the_result_says_what_it_was(real_build: RealBuild) -> None:
    result = real_build.result
    assert (result.release, result.driver_version) == (real_build.kernel.release, VERSION)
    assert result.core_cached is False
    assert result.signed is False
    assert 0 < result.duration_seconds < 300
    assert dict(result.inputs)["compiler"].startswith("gcc ")


def test_nothing_is_left_but_log_and_cache(real_build: RealBuild, real_tree: Workplace) -> None:
    assert not real_build.result.staging.exists()
    assert real_tree.staging == []
    log = real_tree.root / real_build.result.log.lstrip("/")
    assert log.stat().st_mode & 0o777 == 0o640
    assert log.stat().st_uid == os.geteuid()
    assert f"KERNEL_UNAME={real_build.kernel.release}" in real_build.log
    assert "p2p.patch: applied" in real_build.log
    assert "LD [M]" in real_build.log


def test_the_person_is_told_each_step(real_build: RealBuild) -> None:
    steps = [name for name, _, _ in real_build.listener.steps]
    assert steps == ["source", "patches", "core", "modules", "check"]
    assert "CC [M]" in " ".join(text for _, text in real_build.listener.ticks)


def test_a_second_kernel_with_everything_known(
    real_build: RealBuild, real_tree: Workplace, kernel_headers: HeadersCache
) -> None:
    """Core from the cache, Debian's file names, signed, compressed, and progress in fractions."""
    make_key(real_tree.root / "srv")
    kernel = real_kernel(real_tree.host, kernel_headers.releases[1], suffix=".xz")
    secure_boot = SecureBootFacts(
        state=SecureBootState.ON, key="/srv/mok.key", certificate="/srv/mok.der"
    )
    real_tree.listener = Listener()
    plain = real_tree.root / "plain.ko"

    def look(result: BuildResult) -> None:
        for module in result.modules:
            assert module.file.parent == result.staging / "out"
            assert module.file.name == f"{module.base_name}.ko.xz"
            assert module.sha256 == hashlib.sha256(module.file.read_bytes()).hexdigest()
            with plain.open("wb") as sink:
                subprocess.run(["xz", "-dc", module.file], stdout=sink, check=True)
            found = elf(plain)
            assert found.signed
            assert found.build_id == module.build_id
            assert found.modinfo["vermagic"].split()[0] == kernel.release
        listing = subprocess.run(
            ["xz", "--robot", "--list", "-vv", result.modules[0].file],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert "CRC32" in listing
        assert "dict=1MiB" in listing

    result = real_tree.build(
        kernel,
        secure_boot=secure_boot,
        base_names={"nvidia": "nvidia-current-open", "nvidia-drm": "nvidia-current-open-drm"},
        use=look,
    )
    assert result.core_cached
    assert result.signed
    assert [m.base_name for m in result.modules][:1] == ["nvidia-current-open"]
    assert real_tree.listener.detail("core") == "core objects: cached"
    fractions = [fraction for fraction, _ in real_tree.listener.ticks if fraction is not None]
    assert fractions == sorted(fractions)
    assert 0.8 < fractions[-1] <= 0.99
    estimate = next(e for name, _, e in real_tree.listener.steps if name == "modules")
    assert estimate is not None


def test_an_error_deep_in_a_long_log(
    workplace: Workplace, real_tree: Workplace, real_build: RealBuild
) -> None:
    """C28: 4,000 lines, the first error at 3,100, others after it."""
    link_headers(workplace, real_tree)
    source = workplace.source / "kernel-open/nvidia/nv.c"
    warnings = "".join(f"#warning number {n}\n" for n in range(1500))
    source.write_text(f"{warnings}int nv_broken(void) {{ return no_such_thing; }}\n{warnings}")
    error = refused(workplace, real_build.kernel)
    assert error.code == "build-failed"
    assert error.exit_status == 70
    assert "nvidia/nv.c:1501: error: " in error.message
    assert "no_such_thing" in error.message
    assert len(error.detail.splitlines()) == 25
    assert error.hint.split()[-1].startswith("/var/log/gpuguard/build-")
    assert len(workplace.log.splitlines()) > 3000


def test_a_makefile_that_takes_another_kernel(
    workplace: Workplace, real_tree: Workplace, real_build: RealBuild, kernel_headers: HeadersCache
) -> None:
    """C22: it ignores what it is told; here it takes the other kernel instead of uname -r."""
    link_headers(workplace, real_tree)
    other = real_kernel(real_tree.host, kernel_headers.releases[1])
    assert other.headers.build_dir is not None
    makefile = workplace.source / "kernel-open/Makefile"
    overrides = (
        f"override SYSSRC := {workplace.host.path(other.headers.source_dir or '')}\n"
        f"override SYSOUT := {workplace.host.path(other.headers.build_dir)}\n"
    )
    makefile.write_text(overrides + makefile.read_text())
    error = refused(workplace, real_build.kernel)
    assert error.code == "vermagic-mismatch"
    assert other.release in error.message
    assert real_build.kernel.release in error.message


def link_headers(place: Workplace, real_tree: Workplace) -> None:
    """Let a tree of the test's own use the shared tree's kernels, by bind of names, not copies."""
    for name in ("usr", "lib"):
        target = place.root / name
        if target.is_dir():
            target.joinpath("modules").rmdir()
            target.rmdir()
        subprocess.run(["cp", "-al", real_tree.root / name, target], check=True)
