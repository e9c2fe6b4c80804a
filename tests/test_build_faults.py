"""What goes wrong in a build leaves nothing but a log, and one clear error.

Finished modules are copied in place of a compiler's work: milliseconds instead of seconds.
"""

from __future__ import annotations

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
from gpuguard.demo.source import VERSION
from gpuguard.errors import Interrupted, PreflightError, StateError
from tests.building import (
    NO_SECURE_BOOT,
    PATCH,
    USER,
    RealBuild,
    Workplace,
    a_kernel,
    configured,
    copy_modules_instead,
    needs_root,
    refused,
    small_disk,
)


@pytest.fixture
def copied(workplace: Workplace, real_build: RealBuild) -> Workplace:
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


def test_a_patch_that_makes_a_link_out_of_the_tree(copied: Workplace, kernel: KernelFacts) -> None:
    with copied.patch.open("a") as patch:
        patch.write(
            "diff --git a/kernel-open/x.h b/kernel-open/x.h\nnew file mode 120000\n"
            "--- /dev/null\n+++ b/kernel-open/x.h\n@@ -0,0 +1 @@\n+../../tmp/x.h\n"
            "\\ No newline at end of file\n"
        )
    error = refused(copied, kernel)
    assert error.code == "source-link-outside"
    assert "kernel-open/x.h -> ../../tmp/x.h" in error.message


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
