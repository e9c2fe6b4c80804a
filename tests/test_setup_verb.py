"""``gpuguard setup`` on a tree, by the real program: what it installs, keeps and takes away."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpuguard.core.setup import UNIT_DIR
from gpuguard.state import SETUP_FILE
from tests import toys
from tests.box import REPOSITORY, Box
from tests.setupbox import (
    APT,
    HOOK,
    LINK,
    PROGRAM,
    TIMER,
    actions,
    around,
    furnish,
    installed,
    needs_systemctl,
    removed,
)


@pytest.fixture
def host(box: Box) -> Box:
    return furnish(box)


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
