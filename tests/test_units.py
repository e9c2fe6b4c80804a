"""The units, as systemd-analyze sees them: right, without a cycle, and confined."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import get_type_hints

import pytest

from gpuguard.config import GateConfig
from gpuguard.core.setup import Item, items

REPOSITORY = Path(__file__).parents[1]
UNITS = REPOSITORY / "systemd"
MAX_EXPOSURE = 2.0

_PROGRAM = "/usr/bin/true"
#: What else is on a host that serves; Docker's and containerd's own ordering.
_OTHERS = {
    "docker.service": """
[Unit]
After=network-online.target docker.socket containerd.service
Wants=network-online.target containerd.service
[Service]
Type=notify
ExecStart=/usr/bin/true
[Install]
WantedBy=multi-user.target
""",
    "containerd.service": """
[Unit]
After=network.target local-fs.target
[Service]
Type=notify
ExecStart=/usr/bin/true
[Install]
WantedBy=multi-user.target
""",
    "vllm.service": """
[Unit]
Requires=gpuguard-verify.service
After=gpuguard-verify.service docker.service
Wants=docker.service
[Service]
ExecStart=/usr/bin/true
[Install]
WantedBy=multi-user.target
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A unit path with ours as ``setup`` writes them, and others', all enabled."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    top = tmp_path / "units"
    top.mkdir()
    for item in ours():
        target = top / item.path.removeprefix("/etc/systemd/system/")
        target.parent.mkdir(exist_ok=True)
        if item.content is not None:
            target.write_bytes(item.content)
        else:
            target.symlink_to(f"../{target.name}")
    for name, text in _OTHERS.items():
        add(top, name, text)
    return top


def ours() -> tuple[Item, ...]:
    content = {f"systemd/{path.name}": path.read_bytes() for path in UNITS.iterdir()}
    return items(content, {"PROGRAM": _PROGRAM})


def add(top: Path, name: str, text: str) -> None:
    (top / name).write_text(text.lstrip())
    wants = top / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    if not (wants / name).is_symlink():
        (wants / name).symlink_to(f"../{name}")


def verify(top: Path, *units: str) -> str:
    """What systemd-analyze says of units, ours loaded before those of this machine."""
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        env={"SYSTEMD_UNIT_PATH": f"{top}:", "PATH": "/usr/sbin:/usr/bin", "LC_ALL": "C"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.stdout + done.stderr


def names() -> list[str]:
    return sorted(p.name for p in UNITS.iterdir() if p.suffix in (".service", ".timer", ".path"))


@pytest.mark.parametrize("unit", names())
def test_systemd_understands_every_word(unit: str, folder: Path) -> None:
    assert verify(folder, str(folder / unit)) == ""


@pytest.mark.parametrize("target", ["multi-user.target", "graphical.target"])
def test_there_is_no_ordering_cycle_with_what_serves(target: str, folder: Path) -> None:
    said = verify(folder, target)
    assert "cycle" not in said
    assert "gpuguard" not in said


def test_the_cycle_of_a_gate_after_everything_is_seen(folder: Path) -> None:
    """CASES C56: what must not be done, so that the test before this one can fail."""
    gate = folder / "gpuguard-verify.service"
    bad = "[Unit]\nAfter=multi-user.target\nBefore=docker.service\n"
    add(folder, gate.name, gate.read_text().replace("[Unit]\n", bad, 1))
    said = verify(folder, "multi-user.target")
    assert "Found ordering cycle" in said


def test_only_what_serves_waits_for_the_gate() -> None:
    gate = (UNITS / "gpuguard-verify.service").read_text()
    assert not re.search(r"^(Before|WantedBy|RequiredBy)=", gate, re.MULTILINE)
    for unit in names():
        text = (UNITS / unit).read_text()
        ordered = re.findall(r"^(?:After|Before|Requires|Wants|BindsTo)=(.*)$", text, re.MULTILINE)
        assert "gpuguard-verify" not in " ".join(ordered), unit


def test_the_daemon_is_confined(folder: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager",
         f"--threshold={int(MAX_EXPOSURE * 10)}", folder / "gpuguard.service"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-300:]
    match = re.search(r"exposure level for gpuguard\.service: ([\d.]+)", done.stdout)
    assert match is not None
    assert float(match[1]) <= MAX_EXPOSURE


def settings(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", (UNITS / unit).read_text(), re.MULTILINE)


def test_the_daemon_may_read_modules_and_little_else() -> None:
    assert settings("gpuguard.service", "CapabilityBoundingSet") == ["CAP_DAC_READ_SEARCH"]
    assert settings("gpuguard.service", "ProtectKernelModules") == [], "it hides /usr/lib/modules"
    assert settings("gpuguard.service", "IPAddressDeny") == ["any"]


@pytest.mark.parametrize("unit", ["gpuguard-rebuild.service", "gpuguard-verify.service"])
def test_nothing_runs_for_ever(unit: str) -> None:
    """A oneshot has no start timeout of its own."""
    (limit,) = settings(unit, "TimeoutStartSec")
    assert limit != "infinity"


def test_the_gate_outlasts_its_longest_wait() -> None:
    bounds = get_type_hints(GateConfig, include_extras=True)["wait_seconds"].__metadata__[0]
    longest = next(part.le for part in bounds.metadata if hasattr(part, "le"))
    assert longest == 600
    assert settings("gpuguard-verify.service", "TimeoutStartSec") == ["15min"]


def test_no_unit_reloads_systemd() -> None:
    """CASES C57: not from a hook, not from a timer."""
    resources = REPOSITORY / "gpuguard/resources"
    texts = [*UNITS.iterdir(), *(resources / "apt").iterdir(), *(resources / "kernel").iterdir()]
    assert [p.name for p in texts if "daemon-reload" in p.read_text()] == []
