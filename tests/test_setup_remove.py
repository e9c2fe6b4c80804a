"""``gpuguard setup --remove`` on a tree: what goes, what stays, what is in its way."""

from __future__ import annotations

import json
import shutil

import pytest

from gpuguard.core.setup import UNIT_DIR
from gpuguard.state import SETUP_FILE
from tests import toys
from tests.box import K1, K2, Box
from tests.setupbox import TIMER, actions, around, furnish, installed, removed, setup


@pytest.fixture
def host(box: Box) -> Box:
    return furnish(box)


def test_a_removal_leaves_the_tree_as_it_was(host: Box) -> None:
    before = {p for p, kind in around(host).items() if host.path(p).is_file()}
    installed(host)
    document = removed(host)
    after = {p for p, kind in around(host).items() if host.path(p).is_file()}
    assert after == before
    assert set(actions(document).values()) == {"remove"}
    assert not host.path(SETUP_FILE).exists()
    assert list(host.root.rglob("*.wants")) == []
    assert not host.path("/usr/local/lib/gpuguard").exists()
    assert not host.path("/usr/local/share/gpuguard").exists()
    again = host.json("setup", "--remove")
    assert (again.status, again.error["code"]) == (2, "not-set-up")


def test_a_removal_keeps_what_was_changed(host: Box) -> None:
    installed(host)
    host.path(TIMER).write_text("[Timer]\nOnCalendar=daily\n")
    kept = [s for s in removed(host)["steps"] if s["action"] == "keep"]
    assert [(s["path"], s["reason"]) for s in kept] == [(TIMER, "changed")]
    assert host.path(TIMER).exists()


def test_a_removal_leaves_the_modules_and_says_so(host: Box) -> None:
    host.rebuilt()
    installed(host)
    answer = host.run("setup", "--remove")
    assert answer.status == 0, answer.err
    assert f"stays    the patched modules of {K2}" in answer.out
    assert "updates/gpuguard" in host.winner(K2)


def test_a_removal_can_bring_the_stock_modules_back(host: Box) -> None:
    host.rebuilt()
    installed(host)
    answer = host.run("setup", "--remove", "--roll-back")
    assert answer.status == 0, answer.err
    for release in (K1, K2):
        assert f"stock    {release}" in answer.out
        assert host.winner(release).endswith("updates/dkms/nvidia.ko")
    assert not host.path(SETUP_FILE).exists()


def test_if_the_stock_modules_cannot_come_back_nothing_is_removed(host: Box) -> None:
    host.rebuilt()
    installed(host)
    for backup in host.path("/var/lib/gpuguard/backups").glob("*.json"):
        backup.unlink()
    for release in (K1, K2):  # nor are DKMS's own there any more
        shutil.rmtree(host.tree(release) / "updates/dkms")
    before = around(host)
    answer = host.json("setup", "--remove", "--roll-back")
    assert answer.status == 2
    assert around(host) == before
    assert host.path(SETUP_FILE).exists()


def test_rolling_back_goes_with_a_removal_only(host: Box) -> None:
    answer = setup(host, "--roll-back")
    assert (answer.status, answer.error["code"]) == (2, "usage")


def test_an_open_window_is_closed_first(host: Box) -> None:
    installed(host)
    host.path("/var/lib/gpuguard/window.json").write_text('{"schema": 1, "phase": "no such"}')
    before = around(host)
    answer = host.json("setup", "--remove")
    assert (answer.status, answer.error["code"]) == (74, "window-unreadable")
    assert around(host) == before


def test_holds_stay_and_are_named(host: Box) -> None:
    stanza = "Package: nvidia-driver\nStatus: hold ok installed\nVersion: 1\nArchitecture: amd64\n"
    status = host.path("/var/lib/dpkg/status")
    status.parent.mkdir(parents=True, exist_ok=True)
    status.write_text(stanza)
    host.path("/var/lib/gpuguard").mkdir(parents=True, exist_ok=True)
    entry = {"since": "2026-11-29T18:00:00Z", "version": "1"}
    host.path("/var/lib/gpuguard/holds.json").write_text(
        json.dumps({"schema": 1, "active": True, "packages": {"nvidia-driver": entry}})
    )
    installed(host)
    assert (
        "packages on hold: nvidia-driver; to lift that: gpuguard unhold"
        in host.run("setup", "--remove").out
    )
    assert status.read_text() == stanza


# --- what depends on us -------------------------------------------------------------------

GATE = "gpuguard-verify.service"
VLLM = "/etc/systemd/system/vllm.service"


def write(host: Box, path: str, text: str) -> None:
    host.path(path).parent.mkdir(parents=True, exist_ok=True)
    host.path(path).write_text(text)


@pytest.mark.parametrize(
    ("path", "text", "unit"),
    [
        (f"{VLLM}.d/override.conf", f"[Unit]\nRequires={GATE}\nAfter={GATE}\n", "vllm.service"),
        (VLLM, f"[Unit]\nBindsTo=network.target \\\n  {GATE}\n", "vllm.service"),
        ("/usr/lib/systemd/system/llm.target", f"[Unit]\nRequisite={GATE}\n", "llm.target"),
        ("/etc/containers/systemd/vllm.container", f"[Unit]\nRequires={GATE}\n", "vllm.service"),
    ],
)
def test_what_cannot_start_without_us_is_named_before_anything_goes(
    host: Box, path: str, text: str, unit: str
) -> None:
    installed(host)
    write(host, path, text)
    before = around(host)
    refused = host.json("setup", "--remove")
    assert (refused.status, refused.error["code"]) == (69, "units-needed")
    assert f"{unit} needs {GATE} ({path})" in refused.error["message"]
    assert path in refused.error["hint"]
    assert around(host) == before
    dry = removed(host, "--dry-run")
    assert dry["needed_by"] == [{"unit": unit, "needs": GATE, "path": path}]
    assert f"{unit} needs {GATE}" in host.run("setup", "--remove", "--force").out
    assert not host.path(SETUP_FILE).exists()


def test_a_link_that_requires_the_gate_is_a_dependency_too(host: Box) -> None:
    installed(host)
    folder = host.path(f"{UNIT_DIR}/vllm.service.requires")
    folder.mkdir()
    (folder / GATE).symlink_to(f"../{GATE}")
    assert host.json("setup", "--remove").error["code"] == "units-needed"


def test_what_merely_wants_the_gate_starts_without_it(host: Box) -> None:
    installed(host)
    write(host, VLLM, f"[Unit]\nWants={GATE}\nAfter={GATE}\n# Requires={GATE}\n")
    assert set(actions(removed(host)).values()) == {"remove"}


# --- what else it leaves behind, or needs -------------------------------------------------


def test_a_typo_in_the_configuration_keeps_nobody_here(host: Box) -> None:
    installed(host)
    config = host.path("/etc/gpuguard/gpuguard.yaml")
    text = config.read_text()
    config.write_text(f"{text}\nno_such_key: 1\n")
    assert host.json("setup", "--remove", "--roll-back").error["code"] == "config-invalid"
    assert host.path(SETUP_FILE).exists()
    assert removed(host, "--dry-run")["outcome"] == "planned"
    assert removed(host)["outcome"] == "done"
    assert not host.path(SETUP_FILE).exists()


def test_a_reboot_that_is_held_is_forgotten(host: Box) -> None:
    installed(host)
    write(host, "/run/gpuguard/hold-reboot.env", 'WHY="not ready"\nSECONDS=3600\n')
    removed(host)
    assert not host.path("/run/gpuguard/hold-reboot.env").exists()


LOADER = "/efi/loader/loader.conf"
PINNED = """timeout 3
# gpuguard keeps 6.8.0-100-generic the boot default: 6.8.0-110-generic is not ready
# gpuguard: it was: default @saved
default gpuguard-6.8.0-100-generic.conf
"""


def test_the_boot_default_is_let_go(host: Box) -> None:
    installed(host)
    write(host, LOADER, PINNED)
    assert LOADER in " ".join(removed(host, "--dry-run")["notes"])
    assert host.path(LOADER).read_text() == PINNED
    assert f"the newest kernel ({LOADER})" in " ".join(removed(host)["notes"])
    assert host.path(LOADER).read_text() == "timeout 3\ndefault @saved\n"


def test_if_the_boot_menu_cannot_be_written_the_way_by_hand_is_named(host: Box) -> None:
    installed(host)
    pin = "/etc/default/grub.d/zz-gpuguard.cfg"
    write(host, pin, f"{PINNED.splitlines()[1]}\nGRUB_DEFAULT=x\n")
    for menu in host.root.glob("boot/grub*/grub.cfg"):
        menu.unlink()
    notes = " ".join(removed(host)["notes"])
    assert f"rm {pin} && update-grub" in notes
    assert not host.path(SETUP_FILE).exists()


def test_the_stock_modules_that_come_back_are_those_of_today(host: Box) -> None:
    """DKMS has built newer ones since the first rebuild: a backup would be of an older driver."""
    installed(host)
    host.rebuilt()
    toys.stock_modules(host.root, K2, seed="newer stock")
    newer = host.dkms_copy(K2).read_bytes()
    assert host.kernel(K2)["ready"] is True
    answer = host.run("setup", "--remove", "--roll-back")
    assert answer.status == 0, answer.err
    winner = host.path(host.winner(K2))
    assert "/updates/dkms/" in str(winner)
    assert winner.read_bytes() == newer
    assert not (host.tree(K2) / "updates/gpuguard").exists()
