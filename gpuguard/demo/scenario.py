"""The incident and its repair, act by act, on a host tree made for it.

Knows what happens and what must come out; how it is shown is the caller's (see ``Stage``).
Every gpuguard line is a real run of the program on the tree; every module is really
compiled, every dkms and depmod is the distribution's.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpuguard.demo import dkms
from gpuguard.demo.headers import HeadersCache, get_headers
from gpuguard.demo.kernels import add_kernel
from gpuguard.demo.tree import boot_into, make_tree
from gpuguard.errors import UsageError, VerifyError
from gpuguard.host import LocalHost

_VERB_SECONDS = 900.0  # a rebuild takes 6 s on two quiet cores; a loaded machine takes longer
_UNPRIVILEGED = "nobody"  # compiles when the demo runs as root; every Debian has it
_MARK = ".gpuguard-demo"  # a folder with this file is ours to empty


class Stage(Protocol):
    """Where the story is shown."""

    def act(self, title: str, text: str) -> None:
        """A new act, and what happens in it."""

    def command(self, line: str) -> None:
        """A command is about to run."""

    def output(self, line: str) -> None:
        """One line that it printed."""

    def note(self, text: str) -> None:
        """What just happened, in passing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The simulated host: where it is, and its two kernels."""

    root: Path
    old: str
    new: str
    stage: Stage

    def gpuguard(self, *argv: str, expect: Sequence[int]) -> None:
        """Run the program on the tree and insist on its exit status."""
        self.stage.command(f"gpuguard {' '.join(argv)}")
        colour = {"FORCE_COLOR": "1"} if sys.stdout.isatty() else {}
        done = LocalHost().run(
            sys.executable, "-m", "gpuguard", "--root", str(self.root), *argv,
            timeout=_VERB_SECONDS, ok=None, on_line=self.stage.output,
            env={**colour, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        if done.exit_status not in expect:
            raise VerifyError(
                f"`gpuguard {' '.join(argv)}` exited with {done.exit_status} instead of "
                f"{' or '.join(map(str, expect))}",
                code="demo-failed",
                hint=f"run it again with --keep and look into {self.root}",
            )


def play(folder: Path, stage: Stage, *, cards: int, keep: bool) -> None:
    """Make the host below ``folder``, play the story, take the host away again.

    Args:
        folder: made if it is not there; holds ``headers`` (kept for next time) and ``host``.
        stage: where it is shown.
        cards: simulated cards, 2 to 8.
        keep: leave the host tree for a look around.

    Raises:
        GpuguardError: a part is missing, or something did not come out as it must.
    """
    prepare_folder(folder)
    root = folder / "host"
    _remove(root)
    try:
        scene = _curtain(folder, root, stage, cards)
        for act in (_kernel_arrives, _reboot_unguarded, _repair, _dkms_again, _back_and_forth):
            act(scene)
    finally:
        if not keep:
            _remove(root)
    where = f"The host tree is in {root}: gpuguard --root {root} status" if keep else ""
    stage.act("The end", where or "The simulated host is gone again; nothing else was touched.")


def prepare_folder(folder: Path) -> None:
    """Make the demo's folder, or make sure that it is ours.

    Raises:
        UsageError: it belongs to somebody else, or holds something else.
    """
    if not folder.exists():
        folder.mkdir(mode=0o755, parents=True)
        (folder / _MARK).touch()
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise UsageError(f"{folder} is not yours", hint="name another one with --dir")
    if not (folder / _MARK).exists():
        if any(folder.iterdir()):
            raise UsageError(f"{folder} holds other things", hint="name another one with --dir")
        (folder / _MARK).touch()


def _curtain(folder: Path, root: Path, stage: Stage, cards: int) -> Scene:
    stage.act(
        "Setting the scene",
        f"A host with {cards} simulated cards, real kernel headers, real dkms, real modules.",
    )
    headers = get_headers(folder / "headers", say=stage.note)
    old, new = headers.releases[-2:]
    scene = Scene(root=root, old=old, new=new, stage=stage)
    make_tree(root, HeadersCache(headers.root, (old,)), cards=cards, config=_config())
    stage.note(f"dkms builds and installs the stock modules for {old}")
    dkms.install_stock_source(root)
    dkms.dkms_add(root)
    dkms.dkms_install(root, old)
    boot_into(root, old)
    stage.note("gpuguard builds the patched ones once, as on the day the host was set up")
    scene.gpuguard("rebuild", expect=(0,))
    boot_into(root, old)
    scene.gpuguard("status", expect=(0,))
    return scene


def _config() -> dict[str, Any]:
    return {"build": {"user": _UNPRIVILEGED}} if os.geteuid() == 0 else {}


def _kernel_arrives(scene: Scene) -> None:
    scene.stage.act(
        "apt full-upgrade",
        f"A new kernel arrives, {scene.new}. DKMS rebuilds the driver for it, from the stock "
        "source.\nEverything looks green:",
    )
    add_kernel(scene.root, scene.new, scene.root.parent / "headers")
    dkms.dkms_autoinstall(scene.root, scene.new)
    scene.stage.command("dkms status")
    for line in dkms.dkms_status(scene.root).splitlines():
        scene.stage.output(line)
    scene.stage.act("gpuguard looks", "Before anybody reboots:")
    scene.gpuguard("status", expect=(1,))


def _reboot_unguarded(scene: Scene) -> None:
    scene.stage.act(
        "What a reboot would do now",
        "Nobody looked, the host reboots. Every service comes up. And P2P is gone:",
    )
    boot_into(scene.root, scene.new)
    scene.gpuguard("status", expect=(1,))
    scene.stage.note("that was only a look ahead: the host runs the old kernel again")
    boot_into(scene.root, scene.old)


def _repair(scene: Scene) -> None:
    scene.stage.act("gpuguard repairs", "For the kernel that is not running yet:")
    scene.gpuguard("plan", expect=(1,))
    scene.gpuguard("rebuild", expect=(0,))
    scene.gpuguard("status", expect=(0,))
    scene.stage.note("now the host reboots")
    boot_into(scene.root, scene.new)
    scene.gpuguard("status", "--verbose", expect=(0,))


def _dkms_again(scene: Scene) -> None:
    scene.stage.act(
        "DKMS builds stock again",
        "A later `dkms install --force` puts its own copy back; ours lies beside it and wins.",
    )
    dkms.dkms_install(scene.root, scene.new, force=True)
    scene.gpuguard("status", expect=(0,))


def _back_and_forth(scene: Scene) -> None:
    scene.stage.act("Rolling back, and back again", "Every change has a backup, also a rollback.")
    scene.gpuguard("rollback", "--kernel", scene.new, expect=(0,))
    scene.gpuguard("status", expect=(1,))
    scene.gpuguard("rollback", "--kernel", scene.new, expect=(0,))
    scene.gpuguard("status", expect=(0,))
    scene.gpuguard("backups", expect=(0,))


def _remove(root: Path) -> None:
    if root.exists():
        shutil.rmtree(root)
