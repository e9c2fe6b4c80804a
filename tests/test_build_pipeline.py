"""Whole builds: real kbuild on real headers; what goes wrong leaves nothing but a log."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gpuguard.build.records import BuildResult
from gpuguard.config import SigningConfig
from gpuguard.core.facts import MODULE_NAMES, KernelFacts, SecureBootFacts, SecureBootState
from gpuguard.demo.headers import HeadersCache
from gpuguard.demo.source import VERSION
from gpuguard.errors import GpuguardError, Interrupted, PreflightError, StateError
from gpuguard.host.elf import ElfModule, read_module
from tests.building import (
    NO_SECURE_BOOT,
    PATCH,
    USER,
    Listener,
    RealBuild,
    Workplace,
    a_kernel,
    configured,
    copy_modules_instead,
    needs_root,
    real_kernel,
)
from tests.test_build_blockers import small_disk
from tests.test_build_sign import make_key

STOCK_POLICY, PATCHED_POLICY = b"standin-p2p-policy=chipset-not", b"standin-p2p-policy=ok"


def elf(path: Path) -> ElfModule:
    with path.open("rb") as file:
        return read_module(file)


# --- the real thing


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


# --- faults, with finished modules copied in place of a compiler's work


@pytest.fixture
def copied(workplace: Workplace, real_build: RealBuild, tmp_path: Path) -> Workplace:
    """A workplace whose "compiler" copies the modules in ``made``."""
    made = workplace.root / "made"
    made.mkdir()
    for name in MODULE_NAMES:
        (made / f"{name}.ko").write_bytes((real_build.modules / f"{name}.ko").read_bytes())
    copy_modules_instead(workplace, made)
    return workplace


@pytest.fixture
def kernel(real_build: RealBuild) -> KernelFacts:
    """The kernel that ``copied`` has modules for."""
    return a_kernel(real_build.kernel.release)


def refused(place: Workplace, kernel: KernelFacts, **how: object) -> GpuguardError:
    """The error that a build ends with; nothing else is left of it."""
    with pytest.raises(GpuguardError) as caught:
        place.build(kernel, **how)  # type: ignore[arg-type]
    assert place.staging == []
    return caught.value


def test_copying_works(copied: Workplace, kernel: KernelFacts) -> None:
    assert len(copied.build(kernel).modules) == 5


@pytest.mark.parametrize("missing", [("nvidia-uvm",), ("nvidia", "nvidia-drm")])
def test_only_some_modules_built(
    copied: Workplace, kernel: KernelFacts, missing: tuple[str, ...]
) -> None:
    for name in missing:
        (copied.root / f"made/{name}.ko").unlink()
    error = refused(copied, kernel)
    assert error.code == "modules-incomplete"
    assert ", ".join(missing) in error.message


@pytest.mark.parametrize("target", ["/etc/shadow", "nvidia-uvm.ko"])
def test_a_link_in_place_of_a_module(copied: Workplace, kernel: KernelFacts, target: str) -> None:
    makefile = copied.source / "kernel-open/Makefile"
    makefile.write_text(f"{makefile.read_text()}\t@ln -sf {target} nvidia.ko\n")
    assert refused(copied, kernel).code == "modules-incomplete"


@pytest.mark.parametrize("size", [0, 3, 64, 2000, -100])
def test_a_truncated_module(copied: Workplace, kernel: KernelFacts, size: int) -> None:
    file = copied.root / "made/nvidia-drm.ko"
    file.write_bytes(file.read_bytes()[:size])
    error = refused(copied, kernel)
    assert error.code == "module-unreadable"
    assert "nvidia-drm" in error.message


def test_garbage_in_place_of_a_module(copied: Workplace, kernel: KernelFacts) -> None:
    (copied.root / "made/nvidia.ko").write_bytes(os.urandom(20_000))
    assert refused(copied, kernel).code == "module-unreadable"


def test_a_module_without_a_build_id(copied: Workplace, kernel: KernelFacts) -> None:
    subprocess.run(
        ["objcopy", "--remove-section=.note.gnu.build-id", copied.root / "made/nvidia-uvm.ko"],
        check=True,
    )
    error = refused(copied, kernel)
    assert error.code == "no-build-id"
    assert "nvidia-uvm" in error.message


def test_a_module_of_another_kernel(copied: Workplace) -> None:
    error = refused(copied, a_kernel("6.1.0-999-amd64"))
    assert error.code == "vermagic-mismatch"
    assert "6.1.0-999-amd64" in error.message


def test_a_module_of_another_version(copied: Workplace, kernel: KernelFacts) -> None:
    (copied.source / "version.mk").write_text("NVIDIA_VERSION = 999.10.02\n")
    error = refused(copied, kernel, version="999.10.02")
    assert error.code == "module-version-mismatch"
    assert VERSION in error.message
    assert "999.10.02" in error.message


def test_only_the_configured_modules(copied: Workplace, kernel: KernelFacts) -> None:
    config = configured(modules=("nvidia", "nvidia-uvm"))
    result = copied.build(kernel, config)
    assert [module.name for module in result.modules] == ["nvidia", "nvidia-uvm"]
    excluded = "NV_EXCLUDE_KERNEL_MODULES=nvidia-drm nvidia-modeset nvidia-peermem"
    assert excluded in copied.log


def test_a_module_that_this_source_does_not_have(copied: Workplace, kernel: KernelFacts) -> None:
    (copied.source / "kernel-open/nvidia-peermem/nvidia-peermem.Kbuild").unlink()
    assert len(copied.build(kernel).modules) == 4


@pytest.mark.parametrize(
    ("suffix", "test"), [(".zst", "zstd"), (".gz", "gzip"), (".xz", "xz"), ("", None)]
)
def test_compression_as_the_kernels_own(
    copied: Workplace, kernel: KernelFacts, suffix: str, test: str | None
) -> None:
    def look(result: BuildResult) -> None:
        assert all(m.file.name == f"{m.name}.ko{suffix}" for m in result.modules)
        assert sorted(p.name for p in (result.staging / "out").iterdir()) == sorted(
            m.file.name for m in result.modules
        )
        if test:
            subprocess.run([test, "-t", *(m.file for m in result.modules)], check=True)

    copied.build(a_kernel(kernel.release, suffix=suffix), use=look)


def test_a_compiler_that_never_ends(copied: Workplace, kernel: KernelFacts) -> None:
    makefile = copied.source / "kernel-open/Makefile"
    makefile.write_text("modules:\n\t@echo started; sleep 97531\n")
    error = refused(copied, kernel, config=configured(timeout_seconds=2))
    assert error.code == "build-timeout"
    assert error.detail.endswith("started")
    assert no_process_with("97531")


def test_make_without_a_word_of_error(copied: Workplace, kernel: KernelFacts) -> None:
    makefile = copied.source / "kernel-open/Makefile"
    makefile.write_text("modules:\n\t@exit 3\n")
    error = refused(copied, kernel)
    assert error.code == "build-failed"
    assert "*** [Makefile:2: modules] Error 3" in error.message


def test_a_blocker_ends_it_before_it_starts(copied: Workplace, kernel: KernelFacts) -> None:
    error = refused(copied, kernel, config=configured(patches=("/srv/none.patch", PATCH)))
    assert error.code == "patch-missing"
    assert not (copied.root / "var/cache/gpuguard").exists()
    assert not (copied.root / "var/log/gpuguard").exists()


def test_secure_boot_without_a_key_ends_it(copied: Workplace, kernel: KernelFacts) -> None:
    secure_boot = SecureBootFacts(state=SecureBootState.ON)
    error = refused(copied, kernel, secure_boot=secure_boot)
    assert isinstance(error, PreflightError)
    assert error.code == "signing-key-missing"


def test_a_failed_signature_ends_it(
    copied: Workplace, kernel: KernelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "kmodsign"
    tool.write_text("#!/bin/sh\necho 'cannot open key' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (copied.root / "srv/own.key").write_text("")
    signing = SigningConfig(mode="always", key="/srv/own.key", certificate="/srv/own.key")
    error = refused(copied, kernel, config=configured(signing=signing))
    assert error.code == "signing-failed"
    assert "cannot open key" in error.detail


def test_a_patch_that_does_not_apply_ends_it(copied: Workplace, kernel: KernelFacts) -> None:
    (copied.source / "src/nvidia/src/p2p_policy.c").write_text("int other;\n")
    error = refused(copied, kernel)
    assert error.code == "patch-rejected"
    assert "src/nvidia/src/p2p_policy.c" in error.message


def test_what_the_caller_raises_is_the_callers(copied: Workplace, kernel: KernelFacts) -> None:
    def fail(_: BuildResult) -> None:
        raise FileNotFoundError("the caller's")

    with pytest.raises(FileNotFoundError, match="the caller's"):
        copied.build(kernel, use=fail)
    assert copied.staging == []


@needs_root
def test_the_build_user_compiles_and_sees_no_key(copied: Workplace, kernel: KernelFacts) -> None:
    key = copied.root / "srv/mok.key"
    key.write_text("secret")
    key.chmod(0o600)
    makefile = copied.source / "kernel-open/Makefile"
    makefile.write_text(
        f"{makefile.read_text()}\t@id -un; grep Cap /proc/self/status; cat {key} || true\n"
        "\t@touch ../../out/x 2>&1 || true\n"
    )
    copied.build(kernel)
    assert USER in copied.log.splitlines()
    assert "Permission denied" in copied.log
    assert "secret" not in copied.log
    assert all(
        line.split()[1].strip("0") == "" for line in copied.log.splitlines() if "Cap" in line[:3]
    )


@needs_root
def test_finished_files_are_roots(copied: Workplace, kernel: KernelFacts) -> None:
    def look(result: BuildResult) -> None:
        for path in ((result.staging / "out"), *(m.file for m in result.modules)):
            assert path.stat().st_uid == 0
            assert path.stat().st_mode & 0o022 == 0

    copied.build(a_kernel(kernel.release, suffix=".xz"), use=look)


@pytest.mark.parametrize("step", ["source", "patches", "core", "modules", "check"])
def test_a_signal_at_every_step(copied: Workplace, kernel: KernelFacts, step: str) -> None:
    def stop() -> None:
        raise Interrupted(signal.SIGTERM)

    copied.listener.at[step] = stop
    with pytest.raises(Interrupted):
        copied.build(kernel)
    assert copied.staging == []


def test_a_signal_while_it_compiles(copied: Workplace, kernel: KernelFacts) -> None:
    makefile = copied.source / "kernel-open/Makefile"
    makefile.write_text("modules:\n\t@sleep 86421 & sleep 86421\n")

    def handler(signum: int, _: object) -> None:
        raise Interrupted(signum)

    before = signal.signal(signal.SIGALRM, handler)
    copied.listener.at["modules"] = lambda: signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(Interrupted):
            copied.build(kernel)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert copied.staging == []
    assert no_process_with("86421")


def no_process_with(word: str) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(word in " ".join(p.info["cmdline"] or ()) for p in listed()):
            return True
        time.sleep(0.05)
    return False


def listed() -> list[psutil.Process]:
    return list(psutil.process_iter(["cmdline"]))


@needs_root
@pytest.mark.parametrize("step", ["source", "patches", "core", "modules", "check"])
def test_a_disk_that_is_full_at_every_step(
    copied: Workplace, kernel: KernelFacts, step: str
) -> None:
    with small_disk(copied.root / "var/cache", "32M"):
        copied.listener.at[step] = filler(copied.root / "var/cache/filler")
        error = refused(copied, kernel)
    assert error.code == "disk-full"
    assert error.exit_status == 74
    assert isinstance(error, StateError)


@needs_root
def test_a_disk_for_logs_that_is_full(copied: Workplace, kernel: KernelFacts) -> None:
    makefile = copied.source / "kernel-open/Makefile"
    makefile.write_text(f"{makefile.read_text()}\t@seq 10000\n")
    with small_disk(copied.root / "var/log", "1M"):
        copied.listener.at["modules"] = filler(copied.root / "var/log/filler")
        error = refused(copied, kernel)
    assert error.code == "disk-full"


def filler(path: Path) -> Callable[[], object]:
    def fill() -> None:
        with path.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    return fill


@needs_root
def test_a_read_only_cache(copied: Workplace, kernel: KernelFacts) -> None:
    with small_disk(copied.root / "var/cache", "64M"):
        subprocess.run(["mount", "-o", "remount,ro", copied.root / "var/cache"], check=True)
        with pytest.raises(StateError) as caught:
            copied.build(kernel)
    assert caught.value.code == "staging-unwritable"


def test_modules_are_never_read_whole(copied: Workplace, kernel: KernelFacts) -> None:
    """With a module of 300 MB the peak of this process stays where it was."""
    with (copied.root / "made/nvidia.ko").open("r+b") as module:
        module.truncate(300 << 20)
    before = peak_mib()
    copied.build(kernel)
    assert peak_mib() - before < 40


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def test_unsigned_is_said_with_its_reason(copied: Workplace, kernel: KernelFacts) -> None:
    copied.build(kernel, secure_boot=NO_SECURE_BOOT)
    assert "not signed: the kernel has no module signatures" in copied.listener.detail("check")


def test_another_minor_of_the_compiler_is_logged(copied: Workplace, kernel: KernelFacts) -> None:
    inputs = copied.inputs(configured(), kernel, VERSION)
    assert inputs.compiler is not None
    major = inputs.compiler.major
    older = a_kernel(kernel.release, headers={"compiler": f"gcc (Test {major}.0.1) {major}.0.1"})
    copied.build(older)
    assert f"kernel compiled by {major}.0.1, this is" in copied.log
    assert "IGNORE_CC_MISMATCH=1" in copied.log
