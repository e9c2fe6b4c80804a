"""Kernel headers: Debian's two trees, Ubuntu's one, and everything that may lack."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuguard.core.facts import HeadersFacts, HeadersState
from gpuguard.errors import ProbeError
from gpuguard.host import LocalHost
from gpuguard.probes.headers import headers_fingerprint, parse_kernel_config, probe_headers
from tests.trees import Link, make_tree
from tests.unprivileged import as_nobody, public_dir

R = "6.8.0-90-generic"
TREE = f"usr/src/linux-headers-{R}"
CONFIG = """\
#
# Automatically generated file; DO NOT EDIT.
#
CONFIG_CC_VERSION_TEXT="x86_64-linux-gnu-gcc-13 (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0"
CONFIG_X86_64=y
# CONFIG_ARM64 is not set
CONFIG_MODULE_SIG=y
CONFIG_MODULE_SIG_HASH="sha512"
CONFIG_MODULE_SIG_KEY="certs/signing_key.pem"
"""


def headers(root: Path, makefile: str = "VERSION = 6\n") -> Path:
    return make_tree(
        root,
        {
            f"/lib/modules/{R}/build": Link(f"/{TREE}"),
            f"/{TREE}/Makefile": makefile,
            f"/{TREE}/.config": CONFIG,
            f"/{TREE}/Module.symvers": "0x0\tmodule_layout\tvmlinux\tEXPORT_SYMBOL\n",
            f"/{TREE}/include/config/auto.conf": "",
            f"/{TREE}/include/generated/autoconf.h": "",
            f"/{TREE}/include/generated/utsrelease.h": f'#define UTS_RELEASE "{R}"\n',
            f"/{TREE}/scripts/basic/fixdep": "",
            f"/{TREE}/scripts/mod/modpost": "",
        },
    )


def probe(root: Path) -> HeadersFacts:
    return probe_headers(LocalHost(root), R)


def test_ubuntu_single_tree(tmp_path: Path) -> None:
    headers(tmp_path)
    assert probe(tmp_path) == HeadersFacts(
        state=HeadersState.PRESENT,
        build_dir=f"/{TREE}",
        source_dir=f"/{TREE}",
        package=f"linux-headers-{R}",
        compiler="x86_64-linux-gnu-gcc-13 (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0",
        architecture="x86_64",
        release=R,
        module_signing=True,
        signature_hash="sha512",
    )


def test_ubuntu_links_into_the_common_package(tmp_path: Path) -> None:
    headers(tmp_path)
    (tmp_path / TREE / "Makefile").unlink()
    make_tree(tmp_path, {f"/{TREE}/Makefile": Link("../linux-headers-6.8.0-90/Makefile")})
    assert probe(tmp_path).missing == ("Makefile",)  # that package is not installed
    make_tree(tmp_path, {"/usr/src/linux-headers-6.8.0-90/Makefile": "VERSION = 6\n"})
    assert probe(tmp_path).state is HeadersState.PRESENT


@pytest.mark.parametrize(
    "makefile",
    [
        "include /usr/src/linux-headers-6.8.0-common/Makefile\n",  # Debian 10 and later
        "MAKEARGS := -C /usr/src/linux-headers-6.8.0-common O=/usr/src/x\n",  # mkmakefile
    ],
)
def test_debian_two_trees(tmp_path: Path, makefile: str) -> None:
    headers(tmp_path, makefile)
    facts = probe(tmp_path)
    assert facts.state is HeadersState.INCOMPLETE  # -common is not installed
    assert "linux-headers-6.8.0-common" in facts.missing[0]
    make_tree(tmp_path, {"/usr/src/linux-headers-6.8.0-common/Makefile": "VERSION = 6\n"})
    facts = probe(tmp_path)
    assert (facts.state, facts.source_dir) == (
        HeadersState.PRESENT, "/usr/src/linux-headers-6.8.0-common",
    )  # fmt: skip
    assert facts.build_dir == f"/{TREE}"


def test_source_link_of_a_kernel_built_by_hand(tmp_path: Path) -> None:
    headers(tmp_path)
    make_tree(tmp_path, {f"/lib/modules/{R}/source": Link("/home/me/linux")})
    assert probe(tmp_path).source_dir == f"/{TREE}"  # dangling
    make_tree(tmp_path, {"/home/me/linux/Makefile": "VERSION = 6\n"})
    assert probe(tmp_path).source_dir == "/home/me/linux"


def test_no_build_link(tmp_path: Path) -> None:
    make_tree(tmp_path, {f"/lib/modules/{R}/modules.dep": ""})
    facts = probe(tmp_path)
    assert facts.state is HeadersState.MISSING
    assert facts.missing == (f"/lib/modules/{R}/build is not there",)
    assert facts.package == f"linux-headers-{R}"


def test_dangling_build_link(tmp_path: Path) -> None:
    headers(tmp_path)
    shutil.rmtree(tmp_path / TREE)
    facts = probe(tmp_path)
    assert facts.state is HeadersState.MISSING
    assert facts.missing == (f"/lib/modules/{R}/build leads to /{TREE}, which is not there",)


def test_link_to_the_same_path_outside_the_root_does_not_count(tmp_path: Path) -> None:
    # /tmp exists on every machine; inside this root it does not.
    make_tree(tmp_path, {f"/lib/modules/{R}/build": Link("/tmp")})
    assert probe(tmp_path).state is HeadersState.MISSING


@pytest.mark.parametrize(
    "name",
    [
        "Makefile", ".config", "Module.symvers", "include/config/auto.conf",
        "include/generated/autoconf.h", "include/generated/utsrelease.h",
        "scripts/mod/modpost", "scripts/basic/fixdep",
    ],
)  # fmt: skip
def test_incomplete_tree_names_what_lacks(tmp_path: Path, name: str) -> None:
    headers(tmp_path)
    (tmp_path / TREE / name).unlink()
    facts = probe(tmp_path)
    assert (facts.state, facts.missing) == (HeadersState.INCOMPLETE, (name,))


def test_tree_of_another_release(tmp_path: Path) -> None:
    headers(tmp_path)
    uts = tmp_path / TREE / "include/generated/utsrelease.h"
    uts.write_text('#define UTS_RELEASE "6.8.0-100-generic"\n')
    facts = probe(tmp_path)
    assert facts.state is HeadersState.INCOMPLETE
    assert facts.missing == (f"it is for 6.8.0-100-generic, not for {R}",)


def test_utsrelease_without_a_release_is_incomplete(tmp_path: Path) -> None:
    headers(tmp_path)
    (tmp_path / TREE / "include/generated/utsrelease.h").write_bytes(b"\0" * 100)
    assert probe(tmp_path).missing == (f"it is for no release, not for {R}",)


@pytest.mark.parametrize(
    ("text", "architecture"),
    [("CONFIG_ARM64=y\n", "arm64"), ("# CONFIG_X86_64 is not set\n", None), ("", None)],
)
def test_architecture(tmp_path: Path, text: str, architecture: str | None) -> None:
    headers(tmp_path)
    (tmp_path / TREE / ".config").write_text(text)
    facts = probe(tmp_path)
    assert facts.architecture == architecture
    assert (facts.module_signing, facts.signature_hash) == (False, "sha256")


def test_config_of_garbage() -> None:
    assert parse_kernel_config(b"\x00\xff" * 1000) == {}
    assert parse_kernel_config(b"XCONFIG_X86_64=y") == {}
    assert parse_kernel_config(b"CONFIG_X86_64=y") == {"CONFIG_X86_64": "y"}


def test_installed_package_version(tmp_path: Path) -> None:
    headers(tmp_path)
    status = f"Package: linux-headers-{R}\nStatus: {{}}\nVersion: 6.8.0-90.91\n"
    make_tree(tmp_path, {"/var/lib/dpkg/status": status.format("install ok installed")})
    assert probe(tmp_path).package_version == "6.8.0-90.91"
    make_tree(tmp_path, {"/var/lib/dpkg/status": status.format("deinstall ok config-files")})
    assert probe(tmp_path).package_version is None


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "Module.symvers").write_text("0x1\tmodule_layout\n"),
        lambda tree: (tree / ".config").write_text(CONFIG + "CONFIG_X=y\n"),
    ],
)
def test_fingerprint_follows_symvers_and_config(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    host = LocalHost(headers(tmp_path))
    before = probe_headers(host, R, fingerprint=True)
    assert before.fingerprint == headers_fingerprint(host, before)
    assert probe_headers(host, R).fingerprint is None
    (tmp_path / TREE / "Makefile").write_text("VERSION = 7\n")
    assert probe_headers(host, R, fingerprint=True).fingerprint == before.fingerprint
    change(tmp_path / TREE)
    assert probe_headers(host, R, fingerprint=True).fingerprint != before.fingerprint


def test_fingerprint_of_nothing(tmp_path: Path) -> None:
    host = LocalHost(tmp_path)
    assert probe_headers(host, R, fingerprint=True).fingerprint is None
    with pytest.raises(ProbeError):
        headers_fingerprint(host, probe_headers(host, R))


def test_closed_tree_is_incomplete_with_the_reason() -> None:
    with public_dir() as root:
        headers(root)
        (root / TREE).chmod(0o700)
        with as_nobody():
            facts = probe(root)
    assert facts.state is HeadersState.INCOMPLETE
    assert "Permission denied" in facts.missing[0]
