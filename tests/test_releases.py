"""Order of kernel releases, against those who decide it."""

from __future__ import annotations

import subprocess
from functools import cmp_to_key

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuguard.core.releases import flavour, release_key
from gpuguard.host import LocalHost

SORTED = (
    "5.10.0-8-amd64", "5.15.0-97-generic", "5.15.0-101-generic", "6.1.0~rc3-amd64",
    "6.1.0-9-amd64", "6.1.0-47-amd64", "6.8.0-9-generic", "6.8.0-90-generic",
    "6.8.0-90-lowlatency", "6.8.0-100-generic", "6.12.90+deb13-amd64", "6.12.90+deb13.1-amd64",
    "6.12.100+deb13-amd64", "7.0.0-28-generic", "7.0.0-28-generic-64k",
)  # fmt: skip
#: What release names are made of; without "~" at random places, which kernels do not have.
RELEASES = st.from_regex(
    r"[1-9][0-9]?\.[0-9]{1,3}((\+|~rc|-rc|-|\.)(deb[0-9]{1,2}|[0-9]{1,3}|[a-z]{1,4})){0,4}",
    fullmatch=True,
)
HOST = LocalHost()


def test_known_order() -> None:
    assert sorted(SORTED) != list(SORTED)
    assert sorted(set(SORTED), key=release_key) == list(SORTED)


@given(one=RELEASES, other=RELEASES)
def test_equal_keys_are_equal_releases_but_for_leading_zeros(one: str, other: str) -> None:
    if release_key(one) == release_key(other) and one != other:
        assert any(f"{mark}0" in one + other for mark in ".-+bc")


@pytest.mark.skipif(not HOST.has_program("dpkg"), reason="no dpkg here")
@settings(max_examples=60, deadline=None)
@given(one=RELEASES, other=RELEASES)
@example(one="6.12.90+deb13-amd64", other="6.12.90+deb13.1-amd64")
@example(one="6.1.0~rc3", other="6.1.0")
@example(one="6.1.0-rc3", other="6.1.0")
@example(one="6.8.0-a", other="6.8.0-1")
@example(one="6.8.0+", other="6.8.0-")
def test_order_is_dpkgs(one: str, other: str) -> None:
    # "0:" and "-0" make both names an upstream version whole, as linux-version(1) compares.
    def is_less(left: str, right: str) -> bool:
        argv = ["dpkg", "--compare-versions", f"0:{left}-0", "lt", f"0:{right}-0"]
        return subprocess.run(argv, check=False, capture_output=True).returncode == 0

    assert (release_key(one) < release_key(other)) == is_less(one, other)
    assert (release_key(other) < release_key(one)) == is_less(other, one)


@pytest.mark.skipif(not HOST.has_program("linux-version"), reason="no linux-base here")
def test_order_is_that_of_linux_version() -> None:
    def compare(left: str, right: str) -> int:
        argv = ["linux-version", "compare", left, "lt", right]
        return -1 if subprocess.run(argv, check=False).returncode == 0 else 1

    names = [name for name in SORTED if "~" not in name]
    assert sorted(set(names), key=cmp_to_key(compare)) == names


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("6.8.0-90-generic", "generic"), ("6.1.0-47-amd64", "amd64"),
        ("6.12.90+deb13.1-amd64", "amd64"), ("6.17.2", ""), ("6.8.0-90", ""), ("", ""),
        ("6.8.0-90-lowlatency", "lowlatency"),
    ],
)  # fmt: skip
def test_flavour(release: str, name: str) -> None:
    assert flavour(release) == name
