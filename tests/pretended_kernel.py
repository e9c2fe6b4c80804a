"""A kernel that loads and unloads modules in a tree's /sys, and the programs that ask it to.

``rmmod``, ``modprobe`` and ``insmod`` are this file, run by scripts on PATH; ``modprobe
--show-depends`` is the real one, on the tree. Light imports: each step is a process.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
from pathlib import Path

from gpuguard.host.elf import read_module

RELEASE = "6.8.0-90-generic"
DEPENDS = {"nvidia-drm": "nvidia-modeset", "nvidia-modeset": "nvidia", "nvidia-uvm": "nvidia"}
VERSION = "999.10.01"
_SCRIPT = """\
#!{python}
import sys
sys.path.insert(0, {repository!r})
from tests.pretended_kernel import main
main({tree!r})
"""


def install_tools(folder: Path, tree: Path) -> None:
    """Put the stand-ins into a folder for PATH; they work on this tree."""
    folder.mkdir()
    repository = str(Path(__file__).parents[1])
    script = _SCRIPT.format(python=sys.executable, repository=repository, tree=str(tree))
    for name in ("rmmod", "modprobe", "insmod"):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)


def main(root: str) -> None:
    """Be the tool that this process is called."""
    tree, tool, args = Path(root), Path(sys.argv[0]).name, sys.argv[1:]
    if "--show-depends" in args:
        config = f"{tree}/etc/modprobe.d"
        os.execv("/usr/sbin/modprobe", ["modprobe", "-d", root, "-C", config, *args])
    with (tree / "calls").open("a") as log:
        log.write(" ".join([tool, *args]).replace(root, "") + "\n")
    sys.exit(unload(tree, args[0]) if tool == "rmmod" else load(tree, tool, args))


def unload(tree: Path, name: str) -> int:
    """As the kernel: refuse what is in use."""
    folder = tree / "sys/module" / name
    if (tree / f"stuck-{name}").exists() or int((folder / "refcnt").read_text()):
        sys.stderr.write(f"rmmod: ERROR: Module {name} is in use\n")
        return 1
    shutil.rmtree(folder)
    _count(tree, name.replace("_", "-"))
    if name == "nvidia":
        (tree / "proc/driver/nvidia/version").unlink()
    return 0


def load(tree: Path, tool: str, args: list[str]) -> int:
    """As modprobe: what resolves; as insmod: that file. One marked bad does not load."""
    path = Path(args[0]) if tool == "insmod" else _resolved(tree, args[0])
    if path.with_name(f"{path.name}.bad").exists():
        sys.stderr.write(f"{tool}: ERROR: could not insert '{args[0]}': Unknown symbol\n")
        return 1
    put(tree, path, path.name.split(".ko")[0])
    return 0


def put(tree: Path, path: Path, name: str) -> None:
    """This file is what the kernel has loaded under a name."""
    with path.open("rb") as file:
        build_id = bytes.fromhex(read_module(file).build_id or "")
    folder = tree / "sys/module" / name.replace("-", "_")
    (folder / "notes").mkdir(parents=True, exist_ok=True)
    (folder / "holders").mkdir(exist_ok=True)
    note = struct.pack("<III4s", 4, len(build_id), 3, b"GNU") + build_id
    (folder / "notes/.note.gnu.build-id").write_bytes(note)
    (folder / "refcnt").write_text("0\n")
    _count(tree, name)
    if name == "nvidia":
        proc = tree / "proc/driver/nvidia"
        proc.mkdir(parents=True, exist_ok=True)
        (proc / "version").write_text(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {VERSION}  Release\n"
        )


def _resolved(tree: Path, name: str) -> Path:
    folder = tree / "lib/modules" / RELEASE
    lines = (folder / "modules.dep").read_text().splitlines()
    return folder / next(line.split(":")[0] for line in lines if f"/{name}.ko:" in line)


def _count(tree: Path, name: str) -> None:
    """Note a module with the one that it uses, or take the note away."""
    if name not in DEPENDS:
        return
    own = name.replace("-", "_")
    used = tree / "sys/module" / DEPENDS[name].replace("-", "_")
    if (tree / "sys/module" / own).exists():
        (used / "holders" / own).touch()
    else:
        (used / "holders" / own).unlink(missing_ok=True)
    (used / "refcnt").write_text(f"{len(list((used / 'holders').iterdir()))}\n")
