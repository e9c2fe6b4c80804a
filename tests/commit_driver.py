"""Run under faultshim.so: commit a change again and again, killed one operation later each time.

usage: python -m tests.commit_driver WORKDIR {install|replace|rollback}
Prints one JSON object: operations in all, and how each kill ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from gpuguard.apply.backups import list_backups, take
from gpuguard.apply.install import NewModule, install_actions, rollback_actions, touched_paths
from gpuguard.apply.recovery import recover
from gpuguard.apply.transaction import apply
from gpuguard.core.facts import (
    BuildRecord,
    HeadersFacts,
    HeadersState,
    InitramfsFacts,
    InitramfsState,
    KernelFacts,
)
from gpuguard.host import LocalHost
from gpuguard.host.cache import FileCache
from gpuguard.host.files import sha256_file
from gpuguard.probes.modules import probe_modules
from tests import toys

RELEASE = "6.8.0-90-generic"
STRAY = f"/lib/modules/{RELEASE}/updates/old-backup/nvidia.ko"


def make_root(root: Path) -> None:
    """A kernel with stock modules and an old tool's backup in the tree."""
    toys.toy_kernel(root, RELEASE)
    toys.toy_module(root / STRAY[1:], seed="stray")
    toys.stock_modules(root, RELEASE)
    (root / "var/lib").mkdir(parents=True)


def change(root: Path, kind: str, built: Path) -> None:
    """One commit: the first patched modules, newer ones over them, or the way back."""
    host = LocalHost(root)
    kernel = KernelFacts(
        release=RELEASE,
        image=f"/boot/vmlinuz-{RELEASE}",
        modules=probe_modules(host, RELEASE, {}, FileCache(None)),
        headers=HeadersFacts(state=HeadersState.MISSING),
        initramfs=InitramfsFacts(state=InitramfsState.NONE),
    )
    if kind == "rollback":
        backup = list_backups(host, RELEASE)[0]
        apply(
            rollback_actions(host, kernel, backup), host,
            verb="rollback", release=RELEASE, started="t", backup=backup.id,
        )  # fmt: skip
        return
    _install(host, kernel, built, "patched" if kind == "install" else "newer")


def _install(host: LocalHost, kernel: KernelFacts, built: Path, seed: str) -> None:
    modules = []
    for name in toys.NAMES:
        file = built / seed / f"{name}.ko"
        module = toys.toy_module(file, name=name, release=RELEASE, seed=f"{seed} {name}")
        modules.append(
            NewModule(
                name=name,
                file_name=file.name,
                source=file,
                build_id=_build_id(module),
                sha256=sha256_file(file),
            )
        )
    record = BuildRecord(
        release=RELEASE,
        driver_version=toys.VERSION,
        build_ids=tuple((m.name, m.build_id or "") for m in modules),
        created=f"2026-01-0{1 if seed == 'patched' else 2}T00:00:00Z",
    )
    stray = (STRAY,) if host.path(STRAY).exists() else ()
    backup = take(
        host,
        kernel,
        reason="test",
        created=record.created,
        paths=touched_paths(kernel, stray),
    )
    apply(
        install_actions(host, kernel, record, tuple(modules), stray), host,
        verb="rebuild", release=RELEASE, started=record.created, backup=backup.id,
    )  # fmt: skip


def _build_id(path: Path) -> str | None:
    from gpuguard.host.elf import read_module

    with path.open("rb") as file:
        return read_module(file).build_id


def in_child(action: object, kill_at: int) -> tuple[int, int]:
    """Fork, arm, act; returns the wait status and the number of operations done."""
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        shim.arm(ctypes.c_long(kill_at))
        status = 0
        try:
            action()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001
            print(repr(error), file=sys.stderr)
            status = 1
        count = shim.operations()
        shim.arm(ctypes.c_long(-1))
        os.write(writer, str(count).encode())
        os._exit(status)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        count = int(pipe.read() or b"0")
    return status, count


def main() -> None:
    work, kind = Path(sys.argv[1]), sys.argv[2]
    before, built = work / "before", work / "built"
    make_root(before)
    if kind in ("replace", "rollback"):
        change(before, "install", built)
    for name in toys.NAMES:  # compile before anything is counted
        for seed in ("patched", "newer"):
            toys.toy_module(
                built / seed / f"{name}.ko", name=name, release=RELEASE, seed=f"{seed} {name}"
            )
    after = work / "after"
    shutil.copytree(before, after, symlinks=True)
    status, operations = in_child(lambda: change(after, kind, built), 0)
    assert status == 0, status
    old, new = toys.snapshot(before), toys.snapshot(after)
    assert old != new
    ends = {"old": 0, "new": 0}
    problems = []
    for kill_at in range(1, operations + 1):
        root = work / "now"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(before, root, symlinks=True)
        status, _ = in_child(lambda root=root: change(root, kind, built), kill_at)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            problems.append(f"{kill_at}: not killed but {status}")
        # the clean-up itself may be killed as well, at every third of its operations
        in_child(lambda root=root: recover(LocalHost(root)), kill_at % 17 + 1)
        found = recover(LocalHost(root))
        state = toys.snapshot(root)
        end = "old" if state == old else "new" if state == new else "between"
        if end == "between":
            differs = [p for p in {*state, *old} if state.get(p) != old.get(p)]
            problems.append(f"{kill_at}: in between, {found}: {sorted(differs)[:6]}")
        else:
            ends[end] += 1
        if found is not None and found.outcome != f"{end} state":
            problems.append(f"{kill_at}: said {found.outcome}, is {end}")
        if recover(LocalHost(root)) is not None:
            problems.append(f"{kill_at}: recovery is not idempotent")
    print(json.dumps({"operations": operations, "ends": ends, "problems": problems[:10]}))


if __name__ == "__main__":
    main()
