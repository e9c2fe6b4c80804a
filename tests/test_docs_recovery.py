"""The README's recovery by hand, run line by line on a tree that has real modules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from gpuguard import state
from gpuguard.demo.headers import HeadersCache
from gpuguard.demo.tree import write_config
from gpuguard.host import LocalHost
from gpuguard.verbs.inspect import look
from tests.building import folder_for_others
from tests.kit import base_tree, copy_tree
from tests.test_docs import README, REPOSITORY, section


def shell_block(heading: str) -> str:
    """The first shell block below a heading of the README."""
    found = re.search(r"```sh\n(.*?)```", section(README, heading), re.DOTALL)
    assert found is not None
    return found[1]


def by_hand(root: Path, script: str, **values: str) -> str:
    """Run lines of the README on a tree instead of the machine, with other values.

    No line may reach the machine: paths in the text get the root in front, and so do, in the
    stand-in for install(1), those that come out of a manifest.
    """
    for name, value in values.items():
        script = re.sub(rf"(?m)^{name}=\S+", f"{name}={value}", script)
    script = re.sub(r"(?<![\w./$])/(?=\w+/)", f"{root}/", script)
    assert re.findall(rf"(?<![\w./$])/(?!{str(root)[1:]}/)\w+/\S*", script) == []
    assert script.count("$path") == script.count("install -D -m 0644")
    (root / "root").mkdir(exist_ok=True)
    tools = root / "shims"
    tools.mkdir(exist_ok=True)
    for name, line in {
        "depmod": f'exec "{_real("depmod")}" -b "{root}" -C "{root}/etc/depmod.d" "$@"',
        "install": f'[ $# = 5 ] && exec /usr/bin/install "$1" "$2" "$3" "$4" "{root}/$5"',
        "modprobe": f'exec "{_real("modprobe")}" -d "{root}" -C "{root}/etc/modprobe.d" "$@"',
        "update-initramfs": "exit 0",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    given = "".join(f"{name}={value}\n" for name, value in values.items())
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", given + script],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _real(program: str) -> str:
    found = [Path(folder) / program for folder in ("/usr/sbin", "/sbin", "/usr/bin")]
    return str(next(path for path in found if path.exists()))


def resolved(root: Path, release: str) -> dict[str, tuple[str, str | None]]:
    """Identity and build-id of what would be loaded."""
    facts = look(LocalHost(root), None, with_p2p=False)
    kernel = next(kernel for kernel in facts.kernels if kernel.release == release)
    return {m.name: (m.identity.value, m.file.build_id if m.file else None) for m in kernel.modules}


def rebuild(root: Path, *words: str) -> None:
    """The program, as a person would run it."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuguard", "--root", root, "rebuild", *words],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_recovery_by_hand_does_what_the_readme_says(kernel_headers: HeadersCache) -> None:
    (release,) = kernel_headers.releases[:1]
    with folder_for_others() as folder:
        root = copy_tree(base_tree(kernel_headers, 1, stock=True), folder / "host")
        write_config(root, {"build": {"user": "nobody"}})
        stock = resolved(root, release)
        rebuild(root, "--kernel", release)
        patched = resolved(root, release)
        rebuild(root, "--kernel", release, "--force")  # its backup holds the build before
        backups = sorted(path.stem for path in (root / state.BACKUPS_DIR[1:]).glob("*.json"))

        away = by_hand(root, shell_block("### Back to the distribution's modules"), R=release)
        assert "updates/dkms/nvidia.ko" in away
        assert resolved(root, release) == stock

        back = shell_block("### Put a backup back")
        said = by_hand(root, back, R=release, ID=backups[-1])
        assert said.count(": OK\n") == len(stock) + 1  # modules and depmod configuration
        assert resolved(root, release) == patched
        assert {identity for identity, _ in patched.values()} == {"patched"}
