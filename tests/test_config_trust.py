"""Root follows a configuration only where nobody else can have written it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpuguard.config_file import load_config
from gpuguard.errors import ConfigError
from gpuguard.host import LocalHost

MINIMAL = "source:\n  path: /opt/source\n"
ETC = Path("etc/gpuguard")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="checked for root alone; run as root")


@pytest.mark.parametrize("name", ["gpuguard.yaml", "gpuguard.d/1.yaml"])
def test_root_refuses_a_file_that_others_can_write(tmp_path: Path, name: str) -> None:
    host = write(tmp_path)
    path = tmp_path / ETC / name
    path.chmod(0o666)
    error = untrusted(host)
    assert str(error) == (
        f"/etc/gpuguard/{name}: others than root can change it, so root must not follow it"
    )
    assert error.detail == f"/etc/gpuguard/{name}: {path} is writable by everyone (mode 0666)"
    assert error.hint == f"chmod go-w {path}"


def test_root_refuses_a_file_that_somebody_else_owns(tmp_path: Path) -> None:
    host = write(tmp_path)
    path = tmp_path / ETC / "gpuguard.yaml"
    os.chown(path, 12345, 0)
    assert untrusted(host).hint == f"chown root:root {path} && chmod go-w {path}"


def test_root_refuses_a_folder_in_which_others_can_swap_the_file(tmp_path: Path) -> None:
    host = write(tmp_path)
    os.chown(tmp_path / ETC, 0, 12345)
    (tmp_path / ETC).chmod(0o775)
    error = untrusted(host)
    assert error.hint == f"chmod go-w {tmp_path / ETC}"
    # The remedy is exact: after it the file is taken.
    subprocess.run(["sh", "-c", error.hint], check=True)
    assert load_config(host).source.path == "/opt/source"


def write(tree: Path) -> LocalHost:
    (tree / ETC / "gpuguard.d").mkdir(parents=True)
    (tree / ETC / "gpuguard.yaml").write_text(MINIMAL)
    (tree / ETC / "gpuguard.d/1.yaml").write_text("build: {jobs: 1}")
    return LocalHost(tree)


def untrusted(host: LocalHost) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(host)
    assert (caught.value.code, caught.value.exit_status) == ("config-untrusted", 78)
    return caught.value
