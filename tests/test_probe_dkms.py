"""DKMS's grammars, its state tree, and the real program on real trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuguard.core.facts import DkmsEntry
from gpuguard.errors import ProbeError
from gpuguard.host import LocalHost
from gpuguard.probes.dkms import parse_status, probe_dkms, read_tree
from tests.trees import Link, make_tree
from tests.unprivileged import as_nobody, public_dir

GOLDEN = Path(__file__).parent / "golden"


def entry(
    version: str, release: str | None, state: str, remark: str = "", module: str = "nvidia"
) -> DkmsEntry:
    return DkmsEntry(
        module=module,
        version=version,
        release=release,
        architecture=release and "x86_64",
        state=state,
        remark=remark,
    )


def test_status_of_3_0_10() -> None:
    assert parse_status((GOLDEN / "dkms-3.0.10-status.txt").read_text()) == (
        entry("590.44.01", None, "added"),
        entry("590.44.01", "6.8.0-90-generic", "built"),
        entry("590.44.01", "6.8.0-91-generic", "installed"),
        entry(
            "590.44.01",
            "6.8.0-92-generic",
            "installed",
            "WARNING! Diff between built and installed module!",
        ),
    )


def test_status_of_2_8_7() -> None:
    assert parse_status((GOLDEN / "dkms-2.8.7-status.txt").read_text()) == (
        entry("510.47.03", "5.4.0-109-generic", "installed"),
        entry("510.47.03", "5.4.0-110-generic", "installed", "original_module exists"),
        entry("510.47.03", None, "added"),
        entry("6.1.32", "5.4.0-109-generic", "installed", module="virtualbox"),
    )


def test_status_of_3_4() -> None:
    differ = "Differences between built and installed modules"
    gone = "Built modules are missing in the kernel modules folder"
    assert parse_status((GOLDEN / "dkms-3.4-status.txt").read_text()) == (
        entry("590.44.01", "6.8.0-90-generic", "installed", "Original modules exist"),
        entry("590.44.01", "6.8.0-91-generic", "installed", differ),
        entry("590.44.01", "6.8.0-92-generic", "built", gone),
        entry("570.86", None, "broken"),
        entry("590.44.01", "6.8.0-93-generic", "installed-weak", "from 6.8.0-90-generic"),
        entry("550.163.01", "6.12.90+deb13.1-amd64", "installed", module="nvidia-current-open"),
    )


def test_unknown_remark_is_kept() -> None:
    line = "nvidia/1.2, 6.8.0-90-generic, x86_64: installed (this: is (new): really)"
    assert parse_status(line)[0].remark == "this: is (new): really"


@pytest.mark.parametrize(
    "text",
    [
        "", "\n\n", "Error! Could not locate dkms.conf file.", "Deprecated feature: REMAKE_INITRD",
        "nvidia/1.2, 6.8: installed", "nvidia: added", "nvidia/1.2: ", "nvidia/1.2, k, x86_64",
        "Module nvidia/1.2 already installed on kernel 6.8 (x86_64), skip.", "\x00\xff" * 99,
        "nvidia/1.2: sparkling",
    ],
)  # fmt: skip
def test_lines_that_are_no_entries(text: str) -> None:
    good = "nvidia/1.2, 6.8.0-90-generic, x86_64: built"
    assert parse_status(text) == ()
    assert parse_status(f"{text}\n{good}\n{text}") == (entry("1.2", "6.8.0-90-generic", "built"),)


def dkms_tree(root: Path) -> Path:
    top = "/var/lib/dkms/nvidia"
    built = "590.44.01/6.8.0-90-generic/x86_64"
    return make_tree(
        root,
        {
            f"{top}/590.44.01/source": Link("/usr/src/nvidia-590.44.01"),
            "/usr/src/nvidia-590.44.01/dkms.conf": "",
            f"{top}/{built}/module/nvidia.ko": "m",
            f"{top}/590.44.01/6.8.0-100-generic/x86_64/module/nvidia.ko": "m",
            f"{top}/590.44.01/6.8.0-101-generic/x86_64/log/make.log": "failed",
            f"{top}/590.44.01/build": None,
            f"{top}/kernel-6.8.0-90-generic-x86_64": Link(built),
            f"{top}/original_module/6.8.0-90-generic/x86_64": None,
            "/var/lib/dkms/mok.key": "key",
            "/var/lib/dkms/gone/1.0/source": Link("/usr/src/gone-1.0"),
            "/var/lib/dkms/fresh/2.0/source": Link("/usr/src/nvidia-590.44.01"),
        },
    )


TREE = (
    entry("2.0", None, "added", module="fresh"),
    entry("1.0", None, "broken", module="gone"),
    entry("590.44.01", "6.8.0-100-generic", "built"),
    entry("590.44.01", "6.8.0-90-generic", "installed"),
)


def test_tree_is_the_state(tmp_path: Path) -> None:
    assert read_tree(LocalHost(dkms_tree(tmp_path))) == TREE


def test_no_dkms_at_all(tmp_path: Path) -> None:
    assert read_tree(LocalHost(tmp_path)) == ()
    assert probe_dkms(LocalHost(tmp_path)) == ()


def test_link_to_another_version_is_not_installed(tmp_path: Path) -> None:
    root = dkms_tree(tmp_path)
    make_tree(
        root,
        {
            "/var/lib/dkms/nvidia/580.1/6.8.0-90-generic/x86_64/module/nvidia.ko": "m",
            "/var/lib/dkms/nvidia/kernel-6.8.0-100-generic-x86_64": Link("nowhere/at/all"),
        },
    )
    assert entry("580.1", "6.8.0-90-generic", "built") in read_tree(LocalHost(root))
    assert entry("590.44.01", "6.8.0-100-generic", "built") in read_tree(LocalHost(root))


def test_closed_tree_is_an_error() -> None:
    with public_dir() as root:
        dkms_tree(root)
        (root / "var/lib/dkms").chmod(0o700)
        with as_nobody(), pytest.raises(ProbeError):
            read_tree(LocalHost(root))


def test_real_dkms_with_absolute_source_links_in_another_root(tmp_path: Path) -> None:
    # The program follows them on the live host, complains on stderr, and exits with 0.
    host = LocalHost(dkms_tree(tmp_path))
    if not host.has_program("dkms"):
        pytest.skip("no dkms here")
    assert probe_dkms(host) == TREE


def test_real_dkms_agrees_with_the_tree(tmp_path: Path) -> None:
    host = LocalHost(tmp_path)
    if not host.has_program("dkms"):
        pytest.skip("no dkms here")
    conf = (
        "PACKAGE_NAME=toy\nPACKAGE_VERSION=1\nBUILT_MODULE_NAME=toy\n"
        "DEST_MODULE_LOCATION=/updates\n"
    )
    make_tree(tmp_path, {"/usr/src/toy-1/dkms.conf": conf, "/var/lib/dkms": None})
    make_tree(tmp_path, {"/lib/modules": None})
    host.run(
        "dkms", "--dkmstree", str(tmp_path / "var/lib/dkms"),
        "--sourcetree", str(tmp_path / "usr/src"), "add", "toy/1", timeout=30,
    )  # fmt: skip
    expected = (entry("1", None, "added", module="toy"),)
    assert probe_dkms(host) == expected
    assert read_tree(host) == expected
