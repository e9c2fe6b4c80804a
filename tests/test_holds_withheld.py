"""What holds cost: upgrades that they keep away, told by the real apt from a file archive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuguard.core.holds import Withheld, WithheldRecord
from gpuguard.core.withheld import dated, days_between, known_since
from gpuguard.host import LocalHost
from gpuguard.probes.withheld import Known, parse_policy
from gpuguard.verbs.holds import note_withheld
from tests.holds_kit import WITHHELD, HoldBox, make_hold_box, needs_tools
from tests.schema import problems

META = "linux-image-amd64"


@pytest.fixture
def host(empty_root: Path) -> HoldBox:
    """A meta-package on hold, with an ordinary and a security upgrade, the ordinary one newer."""
    box = make_hold_box(empty_root)
    box.install(META, "6.1.1")
    box.install("libnvidia-ml1", "535.1")
    box.publish("bookworm", box.deb(META, "6.1.3"), box.deb("libnvidia-ml1", "535.1"))
    box.publish("bookworm-security", box.deb(META, "6.1.2"))
    box.run("hold")
    return box


@needs_tools
def test_a_security_fix_below_the_candidate_counts(host: HoldBox) -> None:
    document = host.holds()
    assert problems("holds", document) == []
    assert document["withheld"] == [
        {
            "name": META, "installed": "6.1.1", "candidate": "6.1.3",
            "security": True, "since": None, "security_since": None,
        }
    ]  # fmt: skip
    assert document["verdict"] == "ok"  # that is what holds are for
    assert document["lists_updated"] is not None


@needs_tools
def test_looking_changes_nothing_in_the_tree(host: HoldBox) -> None:
    before = sorted(host.root.rglob("*"))
    host.holds()
    assert sorted(host.root.rglob("*")) == before


@needs_tools
def test_a_run_as_root_notes_since_when(host: HoldBox) -> None:
    note_withheld(LocalHost(host.root))
    record = json.loads((host.root / WITHHELD).read_text())
    record["packages"][0] |= {"since": "2026-01-01T00:00:00Z", "security_since": None}
    (host.root / WITHHELD).write_text(json.dumps(record))
    note_withheld(LocalHost(host.root))
    withheld = host.holds()["withheld"][0]
    assert withheld["since"] == "2026-01-01T00:00:00Z"
    assert withheld["security_since"] > "2026-01-02"
    assert host.status()["holds"]["withheld"] == [withheld]
    assert "1 upgrade withheld (1 security)" in host.run("status").out


@needs_tools
def test_what_was_upgraded_since_is_not_withheld(host: HoldBox) -> None:
    note_withheld(LocalHost(host.root))
    host.install(META, "6.1.3")
    host.run("hold")
    assert host.status()["holds"]["withheld"] == []


@needs_tools
def test_holds_of_others_cost_as_much_and_a_pin_is_no_hold(host: HoldBox) -> None:
    host.run("unhold")
    host.apt("apt-mark", "hold", META)
    assert [w["name"] for w in host.holds()["withheld"]] == [META]
    pin = f"Package: {META}\nPin: version 6.1.1\nPin-Priority: 1001\n"
    (host.root / "etc/apt/preferences.d/pin").write_text(pin)
    assert host.holds()["withheld"] == []


@needs_tools
def test_an_apt_that_cannot_be_asked_is_not_nothing_withheld(host: HoldBox, tmp_path: Path) -> None:
    note_withheld(LocalHost(host.root))
    (tmp_path / "apt-cache").write_text("#!/bin/sh\necho 'E: no such thing' >&2\nexit 100\n")
    (tmp_path / "apt-cache").chmod(0o755)
    path = f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin"
    answer = host.run("--json", "holds", PATH=path)
    assert answer.status == 3
    assert answer.document["withheld"] is None
    assert [f["code"] for f in answer.document["findings"]] == ["withheld-unknown"]


@needs_tools
def test_without_lists_nobody_knows(host: HoldBox) -> None:
    lists = host.root / "var/lib/apt/lists"
    for file in [path for path in lists.iterdir() if path.is_file()]:
        file.unlink()
    document = host.holds()
    assert [f["code"] for f in document["findings"]] == ["withheld-unknown"]
    assert document["lists_updated"] is None


def test_since_stays_over_newer_candidates_and_starts_anew_with_another_version() -> None:
    one = Withheld(name="a", installed="1", candidate="2", security=False)
    record = WithheldRecord(looked="t", packages=dated([one], None, "t1"))
    assert record.packages[0].since == "t1"
    assert record.packages[0].security_since is None
    newer = Withheld(name="a", installed="1", candidate="3", security=True)
    assert dated([newer], record, "t2")[0].since == "t1"
    assert dated([newer], record, "t2")[0].security_since == "t2"
    upgraded = Withheld(name="a", installed="2", candidate="3", security=True)
    assert dated([upgraded], record, "t3")[0].since == "t3"
    assert known_since([upgraded], record)[0].since is None


def test_days_and_clocks() -> None:
    assert days_between("2026-11-01T00:00:00Z", "2026-11-29T18:00:00Z") == 28
    assert days_between("2026-12-01T00:00:00Z", "2026-11-29T18:00:00Z") == 0
    assert days_between("", "2026-11-29T18:00:00Z") == 0


POLICY = """\
libnvidia-compute-580:i386:
  Installed: 580.1
  Candidate: 580.2
  Version table:
     580.3 1
          1 http://archive.example.org/ubuntu noble-proposed/restricted i386 Packages
     580.2 500 (phased 20%)
        500 http://archive.example.org/ubuntu noble-updates/restricted i386 Packages
        500 http://security.example.org/ubuntu noble-security/restricted i386 Packages
 *** 580.1 100
        100 /var/lib/dpkg/status
     570.1 500
        500 http://security.example.org/ubuntu noble-security/restricted i386 Packages
linux-image-amd64:
  Installed: (none)
  Candidate: 6.1.192-3
  Version table:
     6.1.192-3 500
        500 http://archive.example.org/debian-security bookworm-security/main amd64 Packages
     6.1.176-1 -1
         -1 http://archive.example.org/debian buster/updates/main amd64 Packages
        500 https://developer.example/repos/debian12/x86_64  Packages
N: Unable to locate package nosuch
"""


def test_the_words_of_apt_cache_policy() -> None:
    assert list(parse_policy(POLICY)) == [
        Known(
            name="libnvidia-compute-580:i386", installed="580.1", candidate="580.2",
            newer=(("580.3", False), ("580.2", True)),
        ),
        Known(
            name="linux-image-amd64", installed=None, candidate="6.1.192-3",
            newer=(("6.1.192-3", True), ("6.1.176-1", True)),
        ),
    ]  # fmt: skip
