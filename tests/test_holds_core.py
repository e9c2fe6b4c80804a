"""The decisions about holds, without a host: names, plans, and every interrupted state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from gpuguard.apply.holds import HOLD, released
from gpuguard.core.hold_findings import hold_findings
from gpuguard.core.hold_plan import HoldPlan, plan_again, plan_hold, plan_lift, plan_unhold
from gpuguard.core.holds import HoldFacts, HoldPolicy, Ledger, hold_state
from gpuguard.core.package_names import (
    HELD_PACKAGES,
    NEVER_HELD_PACKAGES,
    kernel_kind,
    without_branch,
)
from gpuguard.core.packages import Package, name_matcher
from gpuguard.probes.dpkg import parse_status
from gpuguard.probes.package_logs import parse_dpkg_log, parse_history

MEANT_TEXT = """\
linux-image-amd64 linux-image-6.1.0-50-amd64 linux-image-6.12.48+deb13-amd64 linux-headers-amd64
linux-headers-6.1.0-50-common linux-kbuild-6.1 linux-generic linux-generic-hwe-24.04
linux-modules-6.8.0-90-generic linux-modules-extra-6.8.0-90-generic linux-image-oem-24.04
linux-modules-nvidia-580-open-generic linux-modules-nvidia-580-open-6.8.0-90-generic linux-nvidia
nvidia-dkms-580-open nvidia-dkms-open nvidia-driver-580-open nvidia-driver-open nvidia-open
nvidia-kernel-open-dkms nvidia-open-kernel-dkms nvidia-firmware-580-580.95.05 nvidia-persistenced
nvidia-fabricmanager-580 nvidia-utils-580 nvidia-cuda-mps libnvidia-compute-580 libnvidia-compute
libnvidia-ml1 libcuda1 libcudadebugger1 xserver-xorg-video-nvidia-580 cuda-drivers cuda-drivers-580
firmware-nvidia-gsp linux-firmware proxmox-kernel-6.8 proxmox-default-kernel
"""
NOT_MEANT_TEXT = """\
linux-libc-dev linux-base linux-tools-common bash libc6 nvidia-container-toolkit
libnvidia-container1 nvidia-docker2 nvidia-cuda-toolkit nvidia-cuda-dev cuda-toolkit-13-0
firmware-linux-free dkms linux-perf
"""
MEANT, NOT_MEANT = MEANT_TEXT.split(), NOT_MEANT_TEXT.split()


def test_both_naming_schemes_are_meant_and_other_peoples_packages_are_not() -> None:
    names = dict.fromkeys((*MEANT, *NOT_MEANT))
    packages = {name: package(name) for name in names}
    assert HoldPolicy().wanted(packages) == tuple(sorted(MEANT))


@pytest.mark.parametrize(
    "patterns", [HELD_PACKAGES, NEVER_HELD_PACKAGES, ("ba?h", "*-dkms", "lib[nc]*", "a*", "bash")]
)
def test_the_matcher_agrees_with_fnmatch(patterns: tuple[str, ...]) -> None:
    matches = name_matcher(patterns)
    for name in (*MEANT, *NOT_MEANT, "", "a", "ab"):
        assert matches(name) == any(fnmatchcase(name, pattern) for pattern in patterns), name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linux-image-6.1.0-50-amd64", ("linux-image", "amd64")),
        ("linux-image-6.1.0-50-cloud-amd64", ("linux-image", "cloud-amd64")),
        ("linux-image-6.12.48+deb13-amd64", ("linux-image", "amd64")),
        ("linux-headers-6.8.0-90-generic", ("linux-headers", "generic")),
        ("linux-headers-6.8.0-90", ("linux-headers", "")),
        ("linux-modules-nvidia-580-open-6.8.0-90-generic",
         ("linux-modules-nvidia-580-open", "generic")),
        ("proxmox-kernel-6.8.12-4-pve-signed", ("proxmox-kernel", "pve-signed")),
        ("linux-image-amd64", None),
        ("linux-generic-hwe-24.04", None),
        ("proxmox-kernel-6.8", None),
        ("nvidia-dkms-580-open", None),
    ],
)  # fmt: skip
def test_one_abi_or_a_meta(name: str, kind: tuple[str, str] | None) -> None:
    assert kernel_kind(name) == kind


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("nvidia-dkms-580-open", "nvidia-dkms-open"),
        ("libnvidia-compute-580", "libnvidia-compute"),
        ("xserver-xorg-video-nvidia-580", "xserver-xorg-video-nvidia"),
        ("nvidia-driver-580-server-open", "nvidia-driver-server-open"),
        ("nvidia-dkms-open", None),
        ("linux-image-6.1.0-50-amd64", None),
    ],
)
def test_the_name_without_its_branch(before: str, after: str | None) -> None:
    assert without_branch(before) == after


def test_the_fixture_of_c36_without_any_relation() -> None:
    packages = {
        "nvidia-dkms-580-open": package("nvidia-dkms-580-open", HOLD, is_transitional=True),
        "nvidia-dkms-open": package("nvidia-dkms-open"),
        "libnvidia-compute": package("libnvidia-compute"),
    }
    found = hold_state(HoldFacts(packages=packages), HoldPolicy()).ineffective
    assert [(one.name, one.instead) for one in found] == [
        ("nvidia-dkms-580-open", ("nvidia-dkms-open",))
    ]
    facts = HoldFacts(packages=packages)
    (finding,) = hold_findings(facts, hold_state(facts, HoldPolicy()), enforced=True)
    assert "Package: nvidia-dkms-open\\nPin: version 1\\n" in finding.remedy
    assert "/etc/apt/preferences.d/" in finding.remedy


STATUS = """\
Package: nvidia-dkms-580-open
Status: hold ok installed
Section: restricted/oldlibs
Architecture: amd64
Version: 590.48.01
Depends: nvidia-dkms-open (>= 590), dkms:any (>= 2) | dh-dkms, libc6
 (>= 2.3)
Description: Transitional package for nvidia-dkms-open
 It can be removed.

Package: bash
Status: install ok installed
Section: oldlibs
Architecture: amd64
Version: 5
Depends: libc6
"""


def test_what_is_read_of_a_package_on_hold() -> None:
    held, other = parse_status(STATUS)
    assert held.is_transitional
    assert held.depends == ("nvidia-dkms-open", "dkms", "dh-dkms", "libc6")
    assert (other.depends, other.is_transitional) == ((), False)


HISTORY = """
Start-Date: 2026-11-28  06:12:01
Commandline: /usr/bin/unattended-upgrade
Upgrade: linux-image-amd64:amd64 (6.1.1, 6.1.2), libnvidia-ml1:amd64 (1, 2)
End-Date: 2026-11-28  06:12:30

Start-Date: 2026-11-29  18:00:00
Commandline: aptitude safe-upgrade
Requested-By: someone (1000)
Install: linux-image-6.1.0-53-amd64:amd64 (6.1.3, automatic)
Upgrade: linux-image-amd64:amd64 (6.1.2, 6.1.3)
End-Date: 2026-11-29  18:01:00
"""
DPKG_LOG = """\
2026-11-28 06:12:10 upgrade libnvidia-ml1:amd64 1 2
2026-11-28 06:12:10 status half-configured libnvidia-ml1:amd64 1
2026-11-29 19:00:00 upgrade libnvidia-ml1:amd64 2 3
2026-11-29 18:00:30 upgrade linux-image-amd64:amd64 6.1.2 6.1.3
"""


def test_the_last_one_that_changed_a_package() -> None:
    names = ("linux-image-amd64", "libnvidia-ml1", "nosuch", "linux-image")
    history, log = parse_history(HISTORY, names), parse_dpkg_log(DPKG_LOG, names)
    assert set(history) == set(log) == {"linux-image-amd64", "libnvidia-ml1"}
    assert history["linux-image-amd64"].text == (
        "2026-11-29 18:00:00 Upgrade by: aptitude safe-upgrade, someone (1000)"
    )
    assert history["linux-image-amd64"].until > log["linux-image-amd64"].until  # apt did it
    assert history["libnvidia-ml1"].until < log["libnvidia-ml1"].until  # dpkg alone, later
    assert log["libnvidia-ml1"].text == "2026-11-29 19:00:00 upgrade 2 -> 3, dpkg"


def package(
    name: str, selection: str = "install", version: str = "1", *, is_transitional: bool = False
) -> Package:
    return Package(name, version, "installed", "amd64", selection, is_transitional=is_transitional)


def told(facts: HoldFacts, plan: HoldPlan, names: tuple[str, ...], ledger: Ledger) -> HoldFacts:
    """Dpkg has taken the selections of these names only, and this ledger was written last."""
    wanted = {**dict.fromkeys(plan.hold, HOLD)}
    wanted |= {name: released(facts.packages[name]) for name in plan.release}
    packages: Mapping[str, Package] = {
        name: replace(one, selection=wanted[name]) if name in names and name in wanted else one
        for name, one in facts.packages.items()
    }
    return replace(facts, packages=packages, ledger=ledger)


def done(facts: HoldFacts, plan: HoldPlan) -> HoldFacts:
    return told(facts, plan, (*plan.hold, *plan.release), plan.after)


def held(facts: HoldFacts) -> set[str]:
    return {name for name, one in facts.packages.items() if one.is_held}


POLICY = HoldPolicy(packages=("k*", "n*"), exclude=("nx",))
START = HoldFacts(
    packages={
        name: package(name, HOLD if name in ("k1", "other") else "install")
        for name in ("k1", "k2", "n1", "nx", "other")
    }
)
PLANS: dict[str, Callable[[HoldFacts], HoldPlan]] = {
    "hold": lambda facts: plan_hold(facts, POLICY, None, "t"),
    "hold nx": lambda facts: plan_hold(facts, POLICY, ["nx"], "t"),
    "lift": plan_lift,
    "unhold": lambda facts: plan_unhold(facts, None),
    "again": lambda facts: plan_again(facts, POLICY, "t"),
}


@pytest.mark.parametrize("enforce", [True, False])
@pytest.mark.parametrize("last", PLANS)
def test_from_every_interrupted_state_all_is_held_again(*, last: str, enforce: bool) -> None:
    """Replan from each prefix: nothing that we held is forgotten, nothing foreign is touched."""
    facts = START
    for step in ("hold", "hold nx", "lift", "again"):
        if step == last:
            break
        facts = done(facts, PLANS[step](facts))
    plan = PLANS[last](facts)
    changed = (*plan.hold, *plan.release)
    policy = replace(POLICY, enforce=enforce)
    for number in range(len(changed) + 1):
        killed = told(facts, plan, changed[:number], plan.during)
        after = done(killed, plan_again(killed, policy, "t"))
        state = hold_state(after, policy)
        assert held(after) >= held(facts) | set(plan.hold)
        assert (*state.drifted, *state.lifted, *state.missing) == ()
        assert state.foreign == hold_state(START, policy).foreign
        assert plan_again(after, policy, "t").is_empty  # it converges


def test_a_foreign_hold_is_in_no_plan_and_no_ledger() -> None:
    facts = done(START, plan_hold(START, POLICY, None, "t"))
    for make in PLANS.values():
        plan = make(facts)
        assert not {"k1", "other"} & {*plan.hold, *plan.release, *plan.after.packages}


def test_without_enforcing_drift_stays_and_is_only_told() -> None:
    facts = done(START, plan_hold(START, POLICY, None, "t"))
    facts = replace(facts, packages={**facts.packages, "n1": package("n1")})
    lenient = replace(POLICY, enforce=False)
    assert plan_again(facts, lenient, "t").is_empty
    assert hold_state(facts, lenient).drifted == ("n1",)
    assert plan_again(facts, POLICY, "t").restored == ("n1",)


def test_a_window_takes_new_versions_over_and_holds_the_new_kernel() -> None:
    facts = done(START, plan_hold(START, POLICY, None, "t"))
    facts = done(facts, plan_lift(facts))
    assert held(facts) == {"k1", "other"}
    news = {"n1": package("n1", version="2"), "k3": package("k3")}
    facts = replace(facts, packages={**facts.packages, **news})
    for enforce in (True, False):  # the end of a window is no enforcement
        after = done(facts, plan_again(facts, replace(POLICY, enforce=enforce), "t2"))
        assert held(after) == {"k1", "k2", "k3", "n1", "other"}
        assert after.book.packages["n1"].version == "2"
        assert hold_state(after, POLICY).stepped_over == ()
