"""The role's environments: made once, never over something that is somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow
TASKS = Path(__file__).parents[1] / "ansible/roles/vllm/tasks/environment.yml"
ANSIBLE = Path(sys.executable).with_name("ansible-playbook")


@pytest.fixture(autouse=True)
def ansible() -> None:
    if not ANSIBLE.exists():
        pytest.skip("ansible is not installed: pip install ansible-core")
    if os.geteuid() != 0:
        pytest.skip("needs root, who owns the environments: run as root")


def make(environment: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the role's tasks for an environment that needs nothing from elsewhere."""
    play = {
        "hosts": "localhost",
        "connection": "local",
        "vars": {
            "ansible_python_interpreter": sys.executable,
            "vllm_environment": {"path": str(environment), "requirements": ["pip"]},
        },
        "vars_files": [str(TASKS.parents[1] / "vars/main.yml")],
        "tasks": [{"ansible.builtin.include_tasks": str(TASKS)}],
    }
    file = environment.parent / "play.yml"
    file.write_text(yaml.safe_dump([play]))
    env = {**os.environ, "ANSIBLE_LOCAL_TEMP": str(environment.parent / "tmp"),
           "PIP_NO_INDEX": "1", "ANSIBLE_INVENTORY_UNPARSED_WARNING": "0"}  # fmt: skip
    return subprocess.run(
        [str(ANSIBLE), "-i", "localhost,", *options, str(file)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["an environment by hand", "any folder", "a file"])
def test_what_is_somebody_elses_is_left_alone(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "vllm"
    kept = place if kind == "a file" else place / "precious"
    if kind != "a file":
        place.mkdir()
    if kind == "an environment by hand":
        (place / "pyvenv.cfg").write_text("home = /usr/bin\n")
    kept.write_text("of a person")
    done = make(place)
    assert done.returncode != 0
    assert "was not made by this role" in done.stdout
    assert kept.read_text() == "of a person"


def test_made_once_and_again_after_a_run_that_broke_off(tmp_path: Path) -> None:
    place = tmp_path / "vllm"
    place.mkdir()
    (place / "being-installed").write_text("pip\n")
    (place / "half").write_text("")
    done = make(place)
    assert done.returncode == 0, done.stdout
    assert sorted(p.name for p in place.iterdir() if p.name in ("half", "being-installed")) == []
    assert (place / "installed-from").read_text() == "pip\n"
    assert (place / "bin/python").exists()
    again = make(place)
    assert (again.returncode, "changed=0" in again.stdout) == (0, True), again.stdout
