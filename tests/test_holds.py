"""hold, unhold and holds by the real program, dpkg and apt-mark, on a tree with real packages."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from gpuguard.host import LocalHost
from gpuguard.verbs.holds import HoldChange, hold_again
from tests.holds_kit import LEDGER, HoldBox, dpkg_locked, make_hold_box, needs_tools
from tests.schema import problems

pytestmark = needs_tools

IMAGE = "linux-image-6.1.0-50-amd64"
KERNEL = ("linux-image-amd64", IMAGE)


@pytest.fixture
def host(empty_root: Path) -> HoldBox:
    """A kernel with its meta, a driver's library, and a package that no policy means."""
    box = make_hold_box(empty_root)
    box.install(IMAGE)
    box.install("linux-image-amd64", depends=IMAGE)
    box.install("libnvidia-ml1")
    box.install("bash")
    return box


def test_what_is_installed_and_meant_is_held(host: HoldBox) -> None:
    answer = host.run("hold")
    assert answer.status == 0, answer.err
    assert host.held() == ["libnvidia-ml1:amd64", IMAGE, "linux-image-amd64"]
    document = host.holds()
    assert problems("holds", document) == []
    assert document["verdict"] == "ok"
    assert document["active"] is True
    assert document["foreign"] == []
    assert {p["name"]: p["owner"] for p in document["packages"]} == dict.fromkeys(
        ("libnvidia-ml1", *KERNEL), "gpuguard"
    )


def test_the_ledger_is_for_everyone_to_read_and_for_root_to_write(host: HoldBox) -> None:
    host.run("hold")
    assert (host.root / LEDGER).stat().st_mode & 0o777 == 0o644
    assert host.run("holds", user="nobody").status == 0


def test_a_dry_run_changes_nothing_and_says_what_it_would(host: HoldBox) -> None:
    assert "would hold linux-image-amd64" in host.run("hold", "--dry-run").out
    assert host.held() == []
    assert not (host.root / LEDGER).exists()
    host.run("hold")
    assert "would lift linux-image-amd64" in host.run("unhold", "-n").out
    assert len(host.held()) == 3


def test_a_hold_of_somebody_else_is_shown_and_never_lifted(host: HoldBox) -> None:
    host.apt("apt-mark", "hold", "linux-image-amd64")
    answer = host.run("hold")
    assert "left alone, on hold by somebody else: linux-image-amd64" in answer.out
    assert host.holds()["foreign"] == ["linux-image-amd64"]
    refused = host.json("unhold", "linux-image-amd64")
    assert refused.status == 2
    assert refused.error["code"] == "hold-foreign"
    assert host.run("unhold").status == 0
    assert host.held() == ["linux-image-amd64"]
    assert host.holds()["active"] is False


def test_a_foreign_name_among_others_leaves_all_as_it_was(host: HoldBox) -> None:
    host.apt("apt-mark", "hold", "linux-image-amd64")
    host.run("hold")
    before = (host.root / LEDGER).read_bytes()
    assert host.run("unhold", "libnvidia-ml1", "linux-image-amd64").status == 2
    assert len(host.held()) == 3
    assert (host.root / LEDGER).read_bytes() == before


def test_names_are_held_besides_and_lifted_alone(host: HoldBox) -> None:
    host.run("hold", "bash")
    assert host.held() == ["bash"]
    assert host.holds()["active"] is False
    host.run("hold")
    assert host.held() == ["bash", "libnvidia-ml1:amd64", IMAGE, "linux-image-amd64"]
    host.run("unhold", "bash", "libnvidia-ml1")
    assert host.held() == [IMAGE, "linux-image-amd64"]
    # lifted by name: not missed, and not held again by anybody
    assert host.holds()["verdict"] == "ok"
    assert host.holds()["exempt"] == ["bash", "libnvidia-ml1"]
    host.run("hold")
    assert "libnvidia-ml1:amd64" in host.held()


def test_a_name_that_is_not_installed_is_refused_and_the_others_stay(host: HoldBox) -> None:
    answer = host.json("hold", "bash", "nosuch")
    assert answer.status == 2
    assert answer.error["code"] == "package-not-installed"
    assert host.held() == []
    # apt-mark's own way, for comparison: half of it is done
    assert host.apt("apt-mark", "hold", "bash", "nosuch", check=False).returncode == 100


def test_what_apt_mark_did_by_half_is_foreign(host: HoldBox) -> None:
    host.apt("apt-mark", "hold", "linux-image-amd64", "nosuch", check=False)
    half = host.held()
    host.run("hold")
    assert host.holds()["foreign"] == half
    host.run("unhold")
    assert host.held() == half


def test_a_hold_that_apt_mark_lifted_is_drift(host: HoldBox) -> None:
    host.run("hold")
    host.apt("apt-mark", "unhold", "linux-image-amd64")
    document = host.holds()
    assert document["drifted"] == ["linux-image-amd64"]
    finding = document["findings"][0]
    assert finding["code"] == "hold-drift"
    assert "unhold linux-image-amd64" in finding["remedy"]
    # the versioned image stays held, which keeps nothing back now
    assert document["ineffective"] == [IMAGE]
    assert "restored" not in host.run("hold").out
    assert host.holds()["verdict"] == "ok"


def test_a_hold_that_dpkg_stepped_over_is_seen_with_who_did_it(host: HoldBox) -> None:
    host.run("hold")
    host.install("libnvidia-ml1", "2")
    document = host.holds()
    assert document["stepped_over"] == [{"name": "libnvidia-ml1", "recorded": "1", "version": "2"}]
    assert document["drifted"] == ["libnvidia-ml1"]  # dpkg -i takes the hold away, too
    for finding in document["findings"]:
        assert "upgrade 1 2, dpkg" in finding["evidence"]["libnvidia-ml1"].replace(" ->", "")
    host.run("hold")
    assert host.holds()["verdict"] == "ok"
    assert host.ledger()["packages"]["libnvidia-ml1"]["version"] == "2"


def test_what_was_stepped_over_stays_to_be_seen_once_it_is_held_again(host: HoldBox) -> None:
    host.run("hold")
    host.install("libnvidia-ml1", "2")
    change = hold_again(LocalHost(host.root), None)
    assert change.restored == ("libnvidia-ml1",)
    assert host.codes() == {"hold-stepped-over"}
    assert hold_again(LocalHost(host.root), None) == HoldChange()


def test_an_automatic_run_holds_again_and_notes_what_that_costs(host: HoldBox) -> None:
    config = "source: {path: /srv/nvidia}\nlock_timeout_seconds: 0\n"
    (host.root / "etc/gpuguard/gpuguard.yaml").write_text(config)
    host.run("hold")
    host.publish("bookworm-security", host.deb("libnvidia-ml1", "2"))
    host.select(**{"libnvidia-ml1:amd64": "install"})
    host.run("rebuild", "--automatic")  # there is no kernel here, and no source
    assert "libnvidia-ml1:amd64" in host.held()
    withheld = host.status()["holds"]["withheld"]
    assert [(one["name"], one["security"]) for one in withheld] == [("libnvidia-ml1", True)]
    assert withheld[0]["security_since"] is not None
    # told not to enforce, it only says so
    (host.root / "etc/gpuguard/gpuguard.yaml").write_text(f"{config}holds: {{enforce: false}}\n")
    host.select(**{"libnvidia-ml1:amd64": "install"})
    host.run("rebuild", "--automatic")
    assert "libnvidia-ml1:amd64" not in host.held()
    assert "hold-drift" in host.codes()


def test_who_stepped_over_with_apt_is_told_by_apts_history(host: HoldBox) -> None:
    host.publish("bookworm", host.deb("libnvidia-ml1", "2"))
    host.run("hold")
    host.apt("apt-get", "-y", "--allow-change-held-packages", "install", "libnvidia-ml1")
    document = host.holds()
    assert [f["code"] for f in document["findings"]] == ["hold-drift", "hold-stepped-over"]
    evidence = document["findings"][1]["evidence"]["libnvidia-ml1"]
    assert evidence.startswith("1 -> 2; ")
    assert "--allow-change-held-packages install libnvidia-ml1" in evidence


def test_a_versioned_kernel_without_its_meta(host: HoldBox) -> None:
    host.apt("apt-mark", "hold", IMAGE)
    document = host.holds()
    assert document["ineffective"] == [IMAGE]
    assert "linux-image-amd64 is free" in document["findings"][0]["evidence"][IMAGE]
    host.run("hold", "linux-image-amd64")
    assert host.holds()["verdict"] == "ok"


def test_a_transitional_package_holds_nothing(host: HoldBox) -> None:
    """CASES C36: after the renames of branch 590."""
    host.install("nvidia-dkms-open", "590.48.01")
    host.install(
        "nvidia-dkms-580-open", "590.48.01", depends="nvidia-dkms-open (>= 590)",
        section="restricted/oldlibs", description="Transitional package for nvidia-dkms-open",
    )  # fmt: skip
    host.apt("apt-mark", "hold", "nvidia-dkms-580-open")
    document = host.holds()
    assert document["ineffective"] == ["nvidia-dkms-580-open"]
    assert document["findings"][0]["remedy"].startswith("sudo gpuguard hold nvidia-dkms-open;")
    host.run("hold")  # both naming schemes
    assert {"nvidia-dkms-open", "nvidia-dkms-580-open"} <= set(host.held())
    assert host.holds()["verdict"] == "ok"


def test_an_old_library_is_not_taken_for_transitional(host: HoldBox) -> None:
    host.install("libc6")
    host.install("libcuda1", depends="libc6 (>= 1)", section="oldlibs")
    host.run("hold")
    assert host.holds()["ineffective"] == []


def test_a_removed_package_that_is_still_held(host: HoldBox) -> None:
    host.install("nvidia-settings", conffile=True)
    host.run("hold")
    host.dpkg("--force-hold", "--remove", "nvidia-settings")
    host.select(nvidia_settings="hold")
    document = host.holds()
    assert document["ineffective"] == ["nvidia-settings"]
    # ours: taken off hold with the next look at all, and left as dpkg leaves a removed one
    host.run("hold")
    assert ["nvidia-settings", "deinstall"] in [
        line.split() for line in host.dpkg("--get-selections").splitlines()
    ]
    assert "nvidia-settings" not in host.ledger()["packages"]
    assert host.holds()["verdict"] == "ok"


def test_both_architectures_of_a_library(host: HoldBox) -> None:
    host.install("libnvidia-ml1", arch="i386")
    host.run("hold")
    assert {"libnvidia-ml1:amd64", "libnvidia-ml1:i386"} <= set(host.held())
    assert {"libnvidia-ml1", "libnvidia-ml1:i386"} <= set(host.holds()["held"])
    host.run("unhold", "libnvidia-ml1:i386")
    assert "libnvidia-ml1:i386" not in host.held()
    assert "libnvidia-ml1:amd64" in host.held()


def test_a_kernel_that_came_since_is_missing(host: HoldBox) -> None:
    host.run("hold")
    host.install("linux-image-6.1.0-53-amd64")
    document = host.holds()
    assert document["missing"] == ["linux-image-6.1.0-53-amd64"]
    assert [f["code"] for f in document["findings"]] == ["hold-missing"]


def test_policy_decides_what_is_held(host: HoldBox) -> None:
    (host.root / "etc/gpuguard/gpuguard.yaml").write_text(
        "source: {path: /srv/nvidia}\nlock_timeout_seconds: 0\n"
        "holds: {packages: ['ba?h', 'lib*'], exclude: [libnvidia-ml1]}\n"
    )
    host.run("hold")
    assert host.held() == ["bash"]


def test_what_the_policy_no_longer_means_is_set_free(host: HoldBox) -> None:
    host.run("hold")
    (host.root / "etc/gpuguard/gpuguard.yaml").write_text(
        "source: {path: /srv/nvidia}\nholds: {exclude: ['libnvidia*']}\n"
    )
    host.run("hold")
    assert host.held() == [IMAGE, "linux-image-amd64"]


def test_nothing_to_do_is_said_and_writes_nothing(host: HoldBox) -> None:
    host.run("hold")
    before = (host.root / LEDGER).stat().st_ino
    assert host.run("hold").out == "nothing was changed\n"
    assert (host.root / LEDGER).stat().st_ino == before


@pytest.mark.parametrize("content", ["{", '{"schema": 2}', '{"schema": 1, "active": true}', "[]"])
def test_a_ledger_that_cannot_be_read_stops_everything(host: HoldBox, content: str) -> None:
    host.run("hold")
    (host.root / LEDGER).write_text(content)
    for verb in ("hold", "unhold"):
        answer = host.json(verb)
        assert answer.status == os.EX_IOERR
        assert answer.error["code"] == "ledger-unreadable"
        assert len(host.held()) == 3
        assert (host.root / LEDGER).read_text() == content
    assert host.run("holds").status == 3
    assert "holds-unknown" in host.findings()


def test_a_name_that_is_none_makes_the_ledger_unreadable(host: HoldBox) -> None:
    host.run("hold")
    ledger = host.ledger()
    ledger["packages"]["x\nbash hold"] = {"since": "", "version": ""}
    (host.root / LEDGER).write_text(json.dumps(ledger))
    assert host.json("unhold").error["code"] == "ledger-unreadable"


def test_a_ledger_that_others_can_write_is_refused_by_root(host: HoldBox) -> None:
    host.run("hold")
    (host.root / LEDGER).chmod(0o666)
    answer = host.json("unhold")
    assert answer.error["code"] == "ledger-untrusted"
    assert len(host.held()) == 3
    (host.root / LEDGER).chmod(0o644)
    assert host.run("unhold").status == 0


def test_a_dpkg_at_work_is_waited_for_and_not_disturbed(host: HoldBox) -> None:
    (host.root / "etc/gpuguard/gpuguard.yaml").write_text(
        "source: {path: /srv/nvidia}\nlock_timeout_seconds: 0\n"
    )
    with dpkg_locked(host.root):
        answer = host.json("hold")
    assert answer.status == os.EX_TEMPFAIL
    assert answer.error["code"] == "lock-held"
    assert host.held() == []
    assert not (host.root / LEDGER).exists()


def test_status_says_it_in_a_line_and_starts_no_apt(host: HoldBox, tmp_path: Path) -> None:
    trap = tmp_path / "bin"
    trap.mkdir()
    for name in ("apt-cache", "apt-get", "apt-mark", "dpkg", "dpkg-query"):
        (trap / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
        (trap / name).chmod(0o755)
    host.run("hold")
    answer = host.run("status", PATH=f"{trap}:{os.environ['PATH']}")
    assert "holds      holding is on, 3 on hold" in answer.out.replace("  holds  ", "  holds  ")
    assert not (tmp_path / "started").exists()
    assert problems("status", host.status()) == []
    assert host.status()["holds"]["held"] == ["libnvidia-ml1", IMAGE, "linux-image-amd64"]


def fake_dpkg(folder: Path, script: str) -> str:
    """A PATH on which dpkg is another; its script may start the real one as $REAL."""
    folder.mkdir()
    (folder / "dpkg").write_text(f"#!/bin/sh\nREAL={shutil.which('dpkg')}\n{script}")
    (folder / "dpkg").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_what_dpkg_did_not_take_is_named_and_held_at_the_next_chance(
    host: HoldBox, tmp_path: Path
) -> None:
    path = fake_dpkg(tmp_path / "bin", 'grep -v libnvidia | exec $REAL "$@"\n')
    answer = host.run("--json", "hold", PATH=path)
    assert answer.status == os.EX_SOFTWARE
    assert answer.error["code"] == "hold-not-taken"
    assert answer.error["message"] == "dpkg did not take 1 of 3 selections: libnvidia-ml1"
    assert host.held() == [IMAGE, "linux-image-amd64"]
    assert host.codes() == {"hold-lifted"}
    assert hold_again(LocalHost(host.root), None).held == ("libnvidia-ml1",)
    assert host.holds()["verdict"] == "ok"


def test_a_dpkg_that_fails_leaves_all_as_it_was(host: HoldBox, tmp_path: Path) -> None:
    host.run("hold", "bash")
    before = host.ledger()
    path = fake_dpkg(tmp_path / "bin", "echo 'dpkg: error: disk full' >&2; exit 2\n")
    for verb in ("hold", "unhold"):
        answer = host.run("--json", verb, PATH=path)
        assert answer.status == os.EX_UNAVAILABLE
        assert answer.error["detail"] == "dpkg: error: disk full"
    assert host.ledger() == before
    assert host.held() == ["bash"]


def test_a_lock_taken_between_our_look_and_dpkgs_is_waited_for(
    host: HoldBox, tmp_path: Path
) -> None:
    words = "dpkg: error: dpkg frontend lock was locked by another process with pid 4711"
    once = f'test -e {tmp_path}/once || {{ touch {tmp_path}/once; echo "{words}" >&2; exit 2; }}\n'
    answer = host.run("hold", PATH=fake_dpkg(tmp_path / "bin", f'{once}exec $REAL "$@"\n'))
    assert answer.status == 0, answer.err
    assert len(host.held()) == 3


def test_unhold_needs_no_good_configuration(host: HoldBox) -> None:
    host.run("hold")
    (host.root / "etc/gpuguard/gpuguard.yaml").write_text("nonsense: true\n")
    assert host.run("hold").status == os.EX_CONFIG
    assert host.run("unhold").status == 0
    assert host.held() == []


def test_a_dpkg_status_that_cannot_be_read_is_not_no_holds(host: HoldBox) -> None:
    host.run("hold")
    status = host.root / "var/lib/dpkg/status"
    status.rename(status.with_suffix(".old"))
    status.mkdir()
    assert host.run("holds").status == 3
    assert host.findings()["holds-unknown"]["severity"] == "unknown"
    assert host.run("unhold").status != 0
