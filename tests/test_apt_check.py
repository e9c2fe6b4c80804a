"""``gpuguard apt-check``: from apt's list to a warning, by the real program on a tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpuguard.core.apt_check import CHECKED_PACKAGES, REFUSED, expression, parse_packages
from tests import toys
from tests.box import REPOSITORY, SOURCE, Box, make_clone

NEW = "6.8.0-110-generic"
KERNEL = f"linux-image-{NEW} - - none < 6.8.0-110.110 amd64 none /a/linux-image.deb\n"
HEADERS = f"linux-headers-{NEW} - - none < 6.8.0-110.110 amd64 none /a/headers.deb\n"
OTHER_DRIVER = (
    f"libnvidia-compute-580 {toys.VERSION}-0ubuntu1 amd64 same < "
    "580.95.05-0ubuntu1 amd64 same /a/x.deb\n"
)


def ask(box: Box, listed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuguard", "--root", box.root, "apt-check"],
        input=listed, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def answer(box: Box, listed: str) -> tuple[int, str]:
    done = ask(box, listed)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_kernel_that_the_patched_modules_can_be_built_for_is_fine(box: Box) -> None:
    assert answer(box, KERNEL + HEADERS) == (0, "")


def test_a_driver_without_a_patched_source_is_a_warning(box: Box) -> None:
    status, said = answer(box, OTHER_DRIVER)
    assert status == 0
    assert "there is no patched source for driver 580.95.05" in said
    assert "-> " in said, "with a remedy"
    assert "apt goes on" in said


def test_or_a_refusal_if_the_policy_says_so(box: Box) -> None:
    box.configure(apt={"check": "refuse"})
    status, said = answer(box, OTHER_DRIVER)
    assert status == REFUSED
    assert "GPUGUARD_APT_CHECK=never" in said, "how to go on all the same"
    assert answer(box, KERNEL + HEADERS) == (0, "")


def test_or_nothing(box: Box) -> None:
    box.configure(apt={"check": "never"})
    assert answer(box, OTHER_DRIVER) == (0, "")


def test_a_driver_whose_patched_branch_is_in_the_clone_is_fine(box: Box) -> None:
    make_clone(box)
    source = {
        "path": f"/{SOURCE}", "ref": "{driver_version}-p2p", "stock_ref": "{driver_version}",
    }  # fmt: skip
    box.configure(source=source)
    same = OTHER_DRIVER.replace("580.95.05", toys.VERSION)
    assert answer(box, same) == (0, "")
    status, said = answer(box, OTHER_DRIVER)
    assert status == 0
    assert "580.95.05-p2p" in said


def test_a_kernel_is_held_against_the_driver_that_comes_with_it(box: Box) -> None:
    _, said = answer(box, KERNEL + HEADERS + OTHER_DRIVER)
    assert "580.95.05" in said


def test_a_kernel_for_a_driver_without_source_is_a_warning(box: Box) -> None:
    for file in (box.root / SOURCE).iterdir():
        file.rename(file.with_name(f"{file.name}.away"))
    _, said = answer(box, KERNEL + HEADERS)
    assert f"cannot be built for kernel {NEW}" in said


def test_a_kernel_without_its_headers_is_a_warning(box: Box) -> None:
    status, said = answer(box, KERNEL)
    assert status == 0
    assert f"kernel {NEW} comes without its headers" in said
    assert f"linux-headers-{NEW}" in said


@pytest.mark.parametrize(
    "listed",
    [
        f"linux-image-{NEW} 6.8.0-110.110 amd64 none > - - none **REMOVE**\n",
        "nvidia-settings 510.47.03-0ubuntu1 amd64 none < 580.95.05-0ubuntu1 amd64 none /a/x.deb\n",
        "linux-image-generic 6.8.0.100.100 amd64 none < 6.8.0.110.110 amd64 none /a/x.deb\n",
        "", "rubbish\n", "a b c d < f\n",
    ],
)  # fmt: skip
def test_what_changes_no_kernel_and_no_driver_is_nobodys_business(box: Box, listed: str) -> None:
    assert answer(box, listed) == (0, "")


def test_without_a_configuration_nobody_is_asked(box: Box) -> None:
    (box.root / "etc/gpuguard/gpuguard.yaml").unlink()
    assert answer(box, OTHER_DRIVER) == (0, "")


def test_a_broken_configuration_never_refuses(box: Box) -> None:
    (box.root / "etc/gpuguard/gpuguard.yaml").write_text("apt: {check: refuse}\nsource: 5\n")
    done = ask(box, OTHER_DRIVER)
    assert done.returncode not in (0, REFUSED)
    assert done.stdout == "", "the hook says one line itself"


def test_the_format_of_the_real_apt_is_understood() -> None:
    text = (Path(__file__).parent / "golden/apt-2.6-pre-install-pkgs-3.txt").read_text()
    head, _, listed = text.partition("\n\n")
    assert head.startswith("VERSION 3\n")
    upgrade = parse_packages(listed)
    names = {change.name: (change.old, change.new) for change in upgrade.changes}
    assert names["linux-image-6.1.0-50-amd64"] == (None, "6.1.176-1")
    assert names["libnvidia-ml1"] == ("535.247.01-1~deb12u1", "535.261.03-1~deb12u1")
    assert names["linux-headers-6.1.0-47-amd64"] == ("6.1.170-3", None)
    assert upgrade.new_kernels == ("6.1.0-50-amd64",)
    assert upgrade.driver_version == "535.261.03"


@pytest.mark.parametrize(
    ("name", "is_asked"),
    [
        ("linux-image-6.1.0-50-amd64", True),
        ("libnvidia-compute-580", True),
        ("nvidia-dkms-open", True),
        ("xlinux-image-1", False),
        ("linux-libc-dev", False),
        ("libnvidiax", False),
    ],
)
def test_the_hook_looks_for_the_same_names(name: str, is_asked: bool) -> None:
    line = f"{name} - - none < 1 amd64 none /x.deb\n"
    done = subprocess.run(
        ["sed", "-nE", f"/^({expression(CHECKED_PACKAGES)}) /p"],
        input=line, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert bool(done.stdout) == is_asked
