"""What has to be done to put built modules in place, or older ones back.

Ours lie in ``updates/gpuguard/`` beside DKMS's under the base names that modprobe
resolves, with one ``override`` line each; DKMS's own files stay, so that DKMS cannot undo
the patch by rebuilding, and taking ours away brings stock back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuguard.apply.actions import (
    Action,
    CheckInitramfs,
    CheckResolved,
    Depmod,
    ExpectedModule,
    PutFile,
    RebuildInitramfs,
    RemoveFile,
)
from gpuguard.apply.backups import Backup
from gpuguard.apply.objects import ObjectStore
from gpuguard.core.facts import BuildRecord, KernelFacts
from gpuguard.host import Host
from gpuguard.host.files import sha256_file
from gpuguard.records import DEPMOD_HEAD, encode_record, record_path
from gpuguard.state import MODULES_SUBDIR, depmod_file, module_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModule:
    """A module file to install: canonical name, file name with suffixes, content."""

    name: str
    file_name: str
    source: Path
    build_id: str | None
    sha256: str


def our_folder(release: str) -> str:
    """``/lib/modules/<release>/updates/gpuguard``."""
    return f"{module_tree(release)}/{MODULES_SUBDIR}"


def override_config(release: str, base_names: list[str]) -> bytes:
    """depmod.d(5): one line per file name, for exactly this release.

    The release is an unanchored regular expression to depmod (``6.1.0-5`` would match
    6.1.0-54): anchored here, special characters in brackets.
    """
    pattern = "^" + re.sub(r"[^A-Za-z0-9_-]", lambda match: f"[{match[0]}]", release) + "$"
    lines = [f"override {base} {pattern} {MODULES_SUBDIR}" for base in sorted(base_names)]
    head = f": its modules for {release} win over DKMS's copies.\n"
    return DEPMOD_HEAD + (head + "\n".join(lines) + "\n").encode()


def install_actions(
    host: Host,
    kernel: KernelFacts,
    record: BuildRecord,
    modules: tuple[NewModule, ...],
    stray: tuple[str, ...],
) -> tuple[Action, ...]:
    """Put built modules in place; ``stray`` are copies below updates/ to take away."""
    placed = {module.file_name: module for module in modules}
    return (
        # The record first: files of ours on disk must never look like somebody else's.
        PutFile(path=record_path(record.release, record.created), source=encode_record(record)),
        *_place(host, kernel.release, {name: m.source for name, m in placed.items()}),
        *(RemoveFile(path=path) for path in stray),
        *_settle(
            kernel,
            [_base(name) for name in placed],
            tuple(
                ExpectedModule(name=m.name, build_id=m.build_id, sha256=m.sha256) for m in modules
            ),
        ),
    )


def rollback_actions(host: Host, kernel: KernelFacts, backup: Backup) -> tuple[Action, ...]:
    """Make exactly those bytes resolve again that resolved when the backup was taken.

    Where the file of that time is still in its place (DKMS's own copy), ours just goes
    away; where it has changed or gone, its backup is put into our folder.

    Raises:
        RollbackError: a backed-up content is gone or damaged.
    """
    store = ObjectStore(host)
    ours: dict[str, Path] = {}
    folder = host.path(our_folder(kernel.release))
    for module in backup.modules:
        content = store.verified(module.digest)
        # real paths: /lib/modules and /usr/lib/modules are one place on a merged-/usr system
        is_ours = host.path(str(Path(module.path).parent)) == folder
        if not is_ours and _is_there(host, module.path, module.digest):
            continue
        ours[Path(module.path).name] = content
    expected = tuple(
        ExpectedModule(name=m.name, build_id=m.build_id, sha256=m.digest) for m in backup.modules
    )
    return (
        *_place(host, kernel.release, ours),
        *_settle(kernel, [_base(name) for name in ours], expected),
    )


def uncover_actions(host: Host, kernel: KernelFacts) -> tuple[Action, ...] | None:
    """Take ours away, so that what the distribution has there *now* resolves.

    A backup may hold the stock modules of an older driver. None: for a module there is not
    exactly one other file, so that a backup is the only way back.
    """
    folder = host.path(our_folder(kernel.release))
    expected = []
    for module in kernel.modules:
        if module.file is None:
            continue
        files = (module.file, *module.others)
        theirs = [f for f in files if host.path(str(Path(f.path).parent)) != folder]
        if len(theirs) != 1:
            return None
        digest = sha256_file(host.path(theirs[0].path))
        expected.append(
            ExpectedModule(name=module.name, build_id=theirs[0].build_id, sha256=digest)
        )
    return (*_place(host, kernel.release, {}), *_settle(kernel, [], tuple(expected)))


def touched_paths(kernel: KernelFacts, stray: tuple[str, ...]) -> tuple[str, ...]:
    """Files beyond the resolved modules that a change of this kernel may replace."""
    initramfs = (kernel.initramfs.path,) if _has_initramfs(kernel) and kernel.initramfs.path else ()
    return (depmod_file(kernel.release), *initramfs, *stray)


def _place(host: Host, release: str, wanted: Mapping[str, Path]) -> tuple[Action, ...]:
    folder = our_folder(release)
    real = host.path(folder)
    present = sorted(entry.name for entry in real.iterdir()) if real.is_dir() else []
    return (
        *(PutFile(path=f"{folder}/{name}", source=source) for name, source in wanted.items()),
        # also the other suffix of one module: `.ko` beside `.ko.zst`, either may win
        *(RemoveFile(path=f"{folder}/{name}") for name in present if name not in wanted),
    )


def _settle(
    kernel: KernelFacts, base_names: list[str], expected: tuple[ExpectedModule, ...]
) -> tuple[Action, ...]:
    release = kernel.release
    config = depmod_file(release)
    override: Action = (
        PutFile(path=config, source=override_config(release, base_names))
        if base_names
        else RemoveFile(path=config)
    )
    return (
        override,
        Depmod(release=release),
        CheckResolved(release=release, modules=expected),
        *initramfs_actions(kernel),
    )


def initramfs_actions(kernel: KernelFacts) -> tuple[Action, ...]:
    """Rebuild this release's image only if it carries NVIDIA modules, and look inside."""
    if not _has_initramfs(kernel) or kernel.initramfs.path is None:
        return ()
    return (
        RebuildInitramfs(release=kernel.release, path=kernel.initramfs.path),
        CheckInitramfs(release=kernel.release),
    )


def _has_initramfs(kernel: KernelFacts) -> bool:
    return bool(kernel.initramfs.modules)


def _is_there(host: Host, path: str, digest: str) -> bool:
    real = host.path(path)
    return real.is_file() and sha256_file(real) == digest


def _base(file_name: str) -> str:
    return file_name.split(".ko", 1)[0]
