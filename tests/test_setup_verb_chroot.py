"""``gpuguard setup`` in a real Debian without systemd at work, and apt asking the real gpuguard."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import booted_roots
from tests.booted_roots import PROGRAM, RELEASES
from tests.realroot import chroot, mounted
from tests.standin_packages import VERSIONS

pytestmark = pytest.mark.slow

NO_SOURCE = "555.44.03"  # a driver version that no clone of the tests has
SITE = "opt/gpuguard/lib/python3.11/site-packages/gpuguard"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    reason = booted_roots.missing()
    if reason:
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("chroot")
    base = booted_roots.get_base(RELEASES[0])
    wheel = booted_roots.build_wheel(folder)
    with booted_roots.overlay(base.layers, folder) as root:
        booted_roots.install_gpuguard(root, wheel)
        with mounted(root):
            yield root


def gpuguard(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return chroot(root, PROGRAM, *words, check=False)


def install(root: Path, version: str, *environment: str) -> subprocess.CompletedProcess[str]:
    """A package that says which version the driver's userland will have."""
    folder = root / "tmp/package"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "DEBIAN").mkdir(parents=True)
    (folder / "DEBIAN/control").write_text(
        f"Package: libnvidia-compute-555\nVersion: {version}-1\nArchitecture: amd64\n"
        "Maintainer: Test <test@example.org>\nDescription: test\n"
    )
    file = f"/tmp/libnvidia-compute-555_{version}-1_amd64.deb"
    chroot(root, "dpkg-deb", "--build", "--root-owner-group", "/tmp/package", file)
    words = ("apt-get", "-qq", "-y", "--allow-downgrades", "-o", "DPkg::Use-Pty=0", "install")
    return chroot(root, "env", *environment, *words, file, check=False)


def configure(root: Path, check: str) -> None:
    folder = root / "etc/gpuguard/gpuguard.d"
    folder.mkdir(exist_ok=True)
    (folder / "apt.yaml").write_text(f"apt:\n  check: {check}\n")


def test_it_is_installed_without_systemd_and_starts_at_the_next_boot(root: Path) -> None:
    first = gpuguard(root, "setup")
    assert first.returncode == 0, first.stderr
    assert "the units start at the next boot" in first.stdout
    assert "gpuguard-build" in (root / "etc/passwd").read_text()
    again = gpuguard(root, "setup")
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() == "everything is in place"


def test_hooks_call_the_program_of_the_environment(root: Path) -> None:
    assert f"program='{PROGRAM}'" in (root / "usr/local/lib/gpuguard/apt-hook").read_text()
    document = json.loads(gpuguard(root, "--json", "status").stdout)
    codes = {finding["code"] for finding in document["findings"]}
    assert not codes & {"hook-dead", "automation-off", "automation-stale", "automation-unknown"}


def test_apt_is_warned_about_a_driver_without_patched_source(root: Path) -> None:
    configure(root, "warn")
    done = install(root, NO_SOURCE)
    assert done.returncode == 0, done.stderr
    assert f"there is no patched source for driver {NO_SOURCE}" in done.stdout
    fine = install(root, VERSIONS[1])
    assert fine.returncode == 0, fine.stderr
    assert "no patched source" not in fine.stdout


def test_apt_is_stopped_if_the_policy_says_so(root: Path) -> None:
    configure(root, "refuse")
    done = install(root, NO_SOURCE)
    assert done.returncode == 100
    assert f"there is no patched source for driver {NO_SOURCE}" in done.stdout
    installed = chroot(root, "dpkg-query", "-W", "-f", "${Version}", "libnvidia-compute-555")
    assert installed.stdout == f"{VERSIONS[1]}-1"
    passed = install(root, NO_SOURCE, "GPUGUARD_APT_CHECK=never")
    assert passed.returncode == 0, passed.stderr


@pytest.mark.parametrize("fault", ["not a module", "syntax error", "unreadable"])
def test_apt_goes_on_when_python_cannot_run_gpuguard(root: Path, fault: str) -> None:
    """CASES C41: the interpreter has changed, or the package is half unpacked."""
    configure(root, "refuse")
    assert install(root, VERSIONS[1]).returncode == 0
    package = root / SITE
    away = package.with_name("away")
    package.rename(away)
    if fault != "not a module":
        package.mkdir()
        (package / "__init__.py").write_text("def (\n" if fault == "syntax error" else "")
        package.chmod(0o755 if fault == "syntax error" else 0)
    try:
        done = install(root, NO_SOURCE)
    finally:
        shutil.rmtree(package, ignore_errors=True)
        away.rename(package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "apt goes on" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "Error" in (root / "run/gpuguard/apt-check.log").read_text()


def test_taken_away_apt_and_the_modules_are_as_before(root: Path) -> None:
    done = gpuguard(root, "setup", "--remove")
    assert done.returncode == 0, done.stderr
    assert "stays    the account gpuguard-build" in done.stdout
    left = [
        str(path.relative_to(root))
        for top in ("etc/apt", "etc/kernel", "etc/systemd", "usr/local")
        for path in (root / top).rglob("*gpuguard*")
    ]
    assert left == []
    quiet = install(root, VERSIONS[1])
    assert quiet.returncode == 0
    assert "gpuguard:" not in quiet.stdout + quiet.stderr
