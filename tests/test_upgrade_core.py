"""What apt would change, read from its own words, and what follows from that."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuguard.core.packages import Package
from gpuguard.core.upgrade import (
    Change,
    Upgrade,
    choose,
    headers_refusals,
    is_specification,
    kernel_release,
    kernels_to_try,
    parse_simulation,
    reduce,
    without_holds,
)

GOLDEN = Path(__file__).parent / "golden"
K1, K2 = "6.1.0-47-amd64", "6.1.0-50-amd64"


def test_apts_words_are_read() -> None:
    changes = parse_simulation((GOLDEN / "apt-2.6-simulate-install.txt").read_text())
    assert Change(name="linux-image-amd64", old="6.1.170-1", new="6.1.174-1") in changes
    assert Change(name=f"linux-image-{K2}", old=None, new="6.1.174-1") in changes
    assert Change(name="libnvidia-ml1:i386", old="535.1.1-1", new="535.261.03-1~deb12u1") in changes
    assert Change(name="old-thing", old="1.0", new=None) in changes
    assert len(changes) == 7  # each once, whatever Conf says


def test_what_follows_from_the_changes() -> None:
    upgrade = Upgrade(
        changes=parse_simulation((GOLDEN / "apt-2.6-simulate-install.txt").read_text())
    )
    assert upgrade.new_kernels == (K2,)
    assert upgrade.removed_kernels == ()
    assert upgrade.driver_version == "535.261.03"
    assert upgrade.has_headers(K2)
    assert not upgrade.has_headers(K1)


@pytest.mark.parametrize(
    ("package", "release"),
    [
        ("linux-image-6.1.0-50-amd64", "6.1.0-50-amd64"),
        ("linux-image-6.12.41+deb13-amd64", "6.12.41+deb13-amd64"),
        ("linux-image-6.1.0-50-amd64-unsigned", "6.1.0-50-amd64"),
        ("linux-image-unsigned-6.8.0-90-generic", "6.8.0-90-generic"),
        ("linux-image-6.1.0-50-rt-amd64", "6.1.0-50-rt-amd64"),
        ("proxmox-kernel-6.8.12-4-pve-signed", "6.8.12-4-pve"),
        ("linux-image-6.1.0-50-amd64-dbg", None),
        ("linux-image-amd64", None),
        ("linux-image-6.1-amd64", None),
        ("linux-headers-6.1.0-50-amd64", None),
        ("linux-modules-6.8.0-90-generic", None),
    ],
)
def test_which_packages_are_kernels(package: str, release: str | None) -> None:
    assert kernel_release(package) == release


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ((Change(name="libnvidia-compute-580", old="580.95.05-0ubuntu1", new="580.105.08-1"),), "580.105.08"),  # noqa: E501
        ((Change(name="libnvidia-compute", old=None, new="590.48.01-0ubuntu1"),), "590.48.01"),
        ((Change(name="nvidia-utils-580-server", old="1", new="2:580.105.08-1"),), "580.105.08"),
        ((Change(name="nvidia-container-toolkit", old="1.16", new="1.17.8-1"),), None),
        ((Change(name="libnvidia-ml1", old="535.1.1-1", new=None),), None),
    ],
)  # fmt: skip
def test_the_drivers_new_version(changes: tuple[Change, ...], version: str | None) -> None:
    assert Upgrade(changes=changes).driver_version == version


@pytest.mark.parametrize("word", ["linux-image-amd64", "libc6:i386", "nvidia-driver=535.1-1~x+y"])
def test_what_may_be_handed_to_apt(word: str) -> None:
    assert is_specification(word)


def test_the_headers_of_the_flavour_are_named() -> None:
    change = Change(name="linux-image-6.1.0-50-cloud-amd64", old=None, new="1")
    upgrade = Upgrade(changes=(change,))
    (named,) = headers_refusals(upgrade, named=True)
    assert named.hint.startswith("name linux-headers-cloud-amd64 as well")
    (other,) = headers_refusals(upgrade)
    assert other.hint.endswith("apt-get install linux-headers-cloud-amd64")


@pytest.mark.parametrize(
    "word",
    ["pkg+", "pkg-", "pkg=1-", "-o", "--purge", "a", "x;y", "a b", "pkg/sid", "pkg=", "Pkg", ""],
)
def test_what_may_not(word: str) -> None:
    assert not is_specification(word)


def packages(*items: tuple[str, str, str]) -> dict[str, Package]:
    return {
        name: Package(name.partition(":")[0], "1", status, "amd64", selection)
        for name, status, selection in items
    }


def test_holds_of_others_are_left_out() -> None:
    known = packages(
        ("linux-image-amd64", "installed", "hold"),
        ("nvidia-driver", "installed", "hold"),
        ("libnvidia-ml1", "installed", "install"),
        ("linux-image-6.1.0-1-amd64", "config-files", "deinstall"),
        ("vim", "installed", "install"),
    )
    choice = choose(
        known, is_meant=lambda name: name != "vim", ours=frozenset({"linux-image-amd64"})
    )
    assert choice.names == ("libnvidia-ml1", "linux-image-amd64")
    assert choice.foreign == ("nvidia-driver",)


def test_only_what_changes_is_asked_for_in_the_version_that_was_seen() -> None:
    changes = (
        Change(name="linux-image-amd64", old="1", new="2"),
        Change(name=f"linux-image-{K2}", old=None, new="2"),
        Change(name="old-thing", old="1", new=None),
    )
    asked = ("linux-image-amd64", "libnvidia-ml1", "old-thing")
    assert reduce(asked, changes) == ("linux-image-amd64=2",)
    assert reduce(("linux-image-amd64=2",), changes) == ("linux-image-amd64=2",)


def test_the_status_file_without_our_holds() -> None:
    stanzas = [
        "Package: a\nStatus: hold ok installed\nArchitecture: amd64\nVersion: 1",
        "Package: b\nStatus: hold ok installed\nArchitecture: amd64\nVersion: 1",
        "Package: c\nStatus: hold ok installed\nArchitecture: i386\nVersion: 1",
        "Package: d\nStatus: install ok installed\nDescription: x\n Status: hold ok installed",
    ]
    text = without_holds("\n\n".join(stanzas), frozenset({"a", "c:i386", "d"}))
    assert text.split("\n\n") == [
        stanzas[0].replace("hold", "install"),
        stanzas[1],
        stanzas[2].replace("hold", "install"),
        stanzas[3],
    ]


def new(release: str) -> Change:
    return Change(name=f"linux-image-{release}", old=None, new="2")


DRIVER = Change(name="libnvidia-ml1", old="535.1.1-1", new="535.261.03-1")


@pytest.mark.parametrize(
    ("changes", "boots", "tried"),
    [
        # a new kernel decides; the old one is as it was
        ((new(K2),), K1, {K2: True}),
        # the boot default is an older kernel by choice, and stays so: the driver must do there
        ((new(K2), DRIVER), "6.1.0-1-amd64", {K2: True, "6.1.0-1-amd64": True, K1: False}),
        # a new driver: for what boots next it must compile, for others it should
        ((DRIVER,), K1, {K1: True, "6.1.0-1-amd64": False}),
        ((new(K2), DRIVER), K1, {K2: True, K1: False, "6.1.0-1-amd64": False}),
        # another build of an installed kernel
        ((Change(name=f"linux-image-{K1}", old="1", new="2"),), K1, {K1: True}),
        # what goes away need not compile
        (
            (new(K2), DRIVER, Change(name=f"linux-image-{K1}", old="1", new=None)),
            K1,
            {K2: True, "6.1.0-1-amd64": False},
        ),
    ],
)
def test_for_which_kernels_the_build_is_tried(
    changes: tuple[Change, ...], boots: str, tried: dict[str, bool]
) -> None:
    trials = kernels_to_try(Upgrade(changes=changes), ["6.1.0-1-amd64", K1], boots)
    assert {trial.release: trial.is_required for trial in trials} == tried
    required = [trial.is_required for trial in trials]
    assert required == sorted(required, reverse=True)
