"""``gpuguard setup`` on a tree, by the real program: what it installs, keeps and takes away."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuguard.core.setup import UNIT_DIR
from gpuguard.state import SETUP_FILE
from tests import toys
from tests.box import K1, K2, REPOSITORY, Answer, Box

PROGRAM = "/opt/gpuguard/bin/gpuguard"
APT = "/etc/apt/apt.conf.d/99gpuguard"
HOOK = "/usr/local/lib/gpuguard/apt-hook"
TIMER = f"{UNIT_DIR}/gpuguard-rebuild.timer"
LINK = f"{UNIT_DIR}/timers.target.wants/gpuguard-rebuild.timer"
_STATE = ("var/lib/gpuguard", "var/cache/gpuguard", "var/log/gpuguard")


@pytest.fixture
def host(box: Box) -> Box:
    """A tree with a gpuguard in it, and with the account that compiles."""
    for folder in ("etc/apt/apt.conf.d", "etc/systemd/system", "etc/kernel/postinst.d"):
        (box.root / folder).mkdir(parents=True)
    program = box.path(PROGRAM)
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (box.root / "etc/passwd").write_text("nobody:x:65534:65534::/:/bin/false\n")
    return box


def needs_systemctl() -> None:
    if shutil.which("systemctl") is None:
        pytest.skip("systemctl is not installed: apt-get install systemd")


def setup(host: Box, *words: str) -> Answer:
    return host.json("setup", "--program", PROGRAM, *words)


def installed(host: Box, *words: str) -> dict[str, Any]:
    answer = setup(host, *words)
    assert answer.status == 0, answer.out + answer.err
    return dict(answer.document)


def removed(host: Box, *words: str) -> dict[str, Any]:
    answer = host.json("setup", "--remove", *words)
    assert answer.status == 0, answer.out + answer.err
    return dict(answer.document)


def actions(document: Mapping[str, Any]) -> dict[str, str]:
    return {step["path"]: step["action"] for step in document["steps"]}


def around(host: Box) -> dict[str, str]:
    """All but gpuguard's own records."""
    return toys.snapshot(host.root, without=_STATE)


# --- what it installs ---------------------------------------------------------------------


def test_everything_is_there_and_nothing_is_left_to_fill_in(host: Box) -> None:
    document = installed(host)
    assert document["outcome"] == "done"
    for path in (APT, HOOK, TIMER, "/usr/local/share/man/man1/gpuguard.1"):
        assert host.path(path).is_file(), path
    for path in actions(document):
        if host.path(path).is_file():
            assert "@" + "PROGRAM@" not in host.path(path).read_text(), path
    assert f"ExecStart={PROGRAM} rebuild --automatic" in unit(host, "gpuguard-rebuild.service")
    assert f"program='{PROGRAM}'" in host.path(HOOK).read_text()
    assert stat.S_IMODE(host.path(HOOK).stat().st_mode) == 0o755


def unit(host: Box, name: str) -> str:
    return host.path(f"{UNIT_DIR}/{name}").read_text()


def test_units_are_enabled_as_systemctl_does_it(host: Box) -> None:
    installed(host)
    links = sorted(host.root.glob("etc/systemd/system/*.wants/*"))
    names = {f"{path.parent.name}/{path.name}": str(path.readlink()) for path in links}
    assert names == {
        "multi-user.target.wants/gpuguard.service": f"{UNIT_DIR}/gpuguard.service",
        "paths.target.wants/gpuguard-rebuild.path": f"{UNIT_DIR}/gpuguard-rebuild.path",
        "timers.target.wants/gpuguard-rebuild.timer": TIMER,
        "timers.target.wants/gpuguard-verify.timer": f"{UNIT_DIR}/gpuguard-verify.timer",
    }
    needs_systemctl()
    done = subprocess.run(
        ["systemctl", f"--root={host.root}", "is-enabled", *[path.name for path in links]],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["enabled"] * 4, done.stderr


def test_a_dry_run_says_it_all_and_changes_nothing(host: Box) -> None:
    before = around(host)
    planned = installed(host, "--dry-run")
    assert planned["outcome"] == "planned"
    assert around(host) == before
    assert not host.path(SETUP_FILE).exists()
    assert actions(installed(host)) == actions(planned)


def test_the_second_run_changes_nothing_and_says_so(host: Box) -> None:
    installed(host)
    before = toys.snapshot(host.root, without=("var/lib/gpuguard/lock",))
    again = installed(host)
    assert again["outcome"] == "nothing-to-do"
    assert again["steps"] == []
    assert toys.snapshot(host.root, without=("var/lib/gpuguard/lock",)) == before
    assert "everything is in place" in host.run("setup", "--program", PROGRAM).out


def test_a_newer_version_brings_what_nobody_changed_up_to_date(host: Box) -> None:
    installed(host)
    _pretend_older(host, TIMER)
    assert actions(installed(host)) == {TIMER: "update"}


def test_another_version_of_gpuguard_is_remembered(host: Box) -> None:
    """By that the daemon is restarted: it would go on with the code of before."""
    installed(host)
    file = host.path(SETUP_FILE)
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "version": "0.0.1"}))
    assert installed(host)["outcome"] == "done"
    assert json.loads(file.read_text())["version"] == record["version"]
    assert installed(host)["outcome"] == "nothing-to-do"


def _pretend_older(host: Box, path: str) -> None:
    """As if an earlier version of gpuguard had installed this file, with another content."""
    text = "# of an earlier version\n"
    host.path(path).write_text(text)
    file = host.path(SETUP_FILE)
    record = json.loads(file.read_text())
    digest = hashlib.sha256(text.encode()).hexdigest()
    files = [entry for entry in record["files"] if entry["path"] != path]
    record["files"] = [*files, {"path": path, "mode": "0644", "sha256": digest}]
    file.write_text(json.dumps(record))


def test_what_a_newer_version_no_longer_brings_goes_unless_it_was_changed(host: Box) -> None:
    installed(host)
    old, changed = (f"{UNIT_DIR}/gpuguard-{name}.service" for name in ("old", "changed"))
    _pretend_older(host, old)
    _pretend_older(host, changed)
    host.path(changed).write_text("# mine\n")
    assert actions(installed(host)) == {old: "remove", changed: "keep"}
    assert not host.path(old).exists()
    assert host.path(changed).read_text() == "# mine\n"


def test_the_account_that_compiles_is_made(host: Box) -> None:
    if os.geteuid() != 0:
        pytest.skip("accounts are made by root")
    host.configure(build={"user": "gpuguard-build"})
    (host.root / "etc/group").write_text("nogroup:x:65534:\n")
    assert installed(host)["account"] == "gpuguard-build"
    line = next(
        line
        for line in (host.root / "etc/passwd").read_text().splitlines()
        if line.startswith("gpuguard-build:")
    )
    assert line.endswith("/nonexistent:/usr/sbin/nologin")
    assert installed(host)["account"] is None
    removed(host)
    assert "gpuguard-build" in (host.root / "etc/passwd").read_text(), "files may be its own"


# --- what is the operator's ---------------------------------------------------------------


def test_what_the_operator_changed_stays_and_is_named(host: Box) -> None:
    installed(host)
    host.path(TIMER).write_text("[Timer]\nOnCalendar=daily\n")
    before = around(host)
    kept = installed(host)
    assert [(s["action"], s["path"], s["reason"]) for s in kept["steps"]] == [
        ("keep", TIMER, "changed")
    ]
    assert around(host) == before
    assert "--force" in host.run("setup", "--program", PROGRAM).out
    assert actions(installed(host, "--force")) == {TIMER: "update"}
    assert "OnCalendar=daily" not in host.path(TIMER).read_text()


def test_what_was_there_before_us_stays(host: Box) -> None:
    host.path(APT).write_text("// mine\n")
    assert actions(installed(host))[APT] == "keep"
    assert removed(host)
    assert host.path(APT).read_text() == "// mine\n"


def test_a_unit_that_was_disabled_stays_so(host: Box) -> None:
    installed(host)
    needs_systemctl()
    subprocess.run(["systemctl", f"--root={host.root}", "disable", "gpuguard-rebuild.timer"],
                   check=True, capture_output=True)  # fmt: skip
    assert not host.path(LINK).is_symlink()
    kept = installed(host)
    assert [(s["action"], s["path"], s["reason"]) for s in kept["steps"]] == [
        ("keep", LINK, "disabled")
    ]
    assert not host.path(LINK).is_symlink()
    assert actions(installed(host, "--force")) == {LINK: "enable"}
    assert host.path(LINK).is_symlink()


def test_what_is_missing_is_put_back(host: Box) -> None:
    installed(host)
    host.path(HOOK).unlink()
    assert actions(installed(host)) == {HOOK: "write"}


# --- taking it away -----------------------------------------------------------------------


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


# --- whom root would run ------------------------------------------------------------------


def test_a_program_that_others_can_write_is_refused(host: Box) -> None:
    if os.geteuid() != 0:
        pytest.skip("root alone distrusts")
    host.path(PROGRAM).chmod(0o775)
    os.chown(host.path(PROGRAM), 0, 100)
    before = around(host)
    answer = setup(host)
    assert (answer.status, answer.error["code"]) == (69, "program-untrusted")
    assert around(host) == before


@pytest.mark.parametrize("what", ["lib/python3/site-packages/gpuguard/__main__.py", "bin/python"])
def test_so_is_one_whose_environment_others_can_write(host: Box, what: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("root alone distrusts")
    environment = host.path(PROGRAM).parents[1]
    (environment / "pyvenv.cfg").touch()
    file = environment / what
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    assert setup(host, "--dry-run").status == 0
    os.chown(file, 65534, 65534)
    answer = setup(host)
    assert (answer.status, answer.error["code"]) == (69, "program-untrusted")
    assert str(file) in answer.error["message"]


def test_so_is_a_folder_of_hooks_that_others_can_write(host: Box) -> None:
    if os.geteuid() != 0:
        pytest.skip("root alone distrusts")
    folder = host.path("/usr/local/lib")
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    answer = setup(host)
    assert (answer.status, answer.error["code"]) == (69, "program-untrusted")


def test_the_program_must_be_there_and_have_a_plain_name(host: Box) -> None:
    assert host.json("setup").error["code"] == "setup-program-missing", "ours is not in this tree"
    odd = host.root / "opt/my gpuguard"
    odd.write_text("#!/bin/sh\n")
    odd.chmod(0o755)
    answer = host.json("setup", "--program", "/opt/my gpuguard")
    assert (answer.status, answer.error["code"]) == (2, "program-path")


# --- completion ---------------------------------------------------------------------------


def test_completion_completes_verbs_and_options(host: Box, tmp_path: Path) -> None:
    installed(host)
    script = host.path("/usr/local/share/bash-completion/completions/gpuguard").read_text()
    program = tmp_path / "gpuguard"
    start = "import sys; sys.argv[0] = 'gpuguard'; from gpuguard.__main__ import main; main()"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{start}" "$@"\n')
    program.chmod(0o755)

    def complete(line: str) -> set[str]:
        words = line.split(" ")
        body = (
            f"{script}\nCOMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); "
            f"COMP_CWORD={len(words) - 1}; _gpuguard_completion gpuguard; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        environment = {
            **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY),
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", body], env=environment, capture_output=True, text=True, check=True
        )
        return set(done.stdout.split())

    assert {"setup", "status"} <= complete("gpuguard s")
    assert "apt-check" not in complete("gpuguard a")
    assert "--roll-back" in complete("gpuguard setup --r")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_of_their_own(host: Box, shell: str) -> None:
    installed(host)
    path = {
        "zsh": "/usr/local/share/zsh/site-functions/_gpuguard",
        "fish": "/usr/local/share/fish/vendor_completions.d/gpuguard.fish",
    }[shell]
    text = host.path(path).read_text()
    assert f"_GPUGUARD_COMPLETE=complete_{shell}" in text
    if shell == "zsh":
        assert text.startswith("#compdef gpuguard"), "or zsh does not find it"


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
