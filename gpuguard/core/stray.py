"""Module files that should not lie where they lie: they compete, or wait to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

from gpuguard.core.facts import HostFacts, KernelFacts
from gpuguard.core.findings import Finding, Severity

_OWNED_FOLDERS = ("updates/dkms", "updates/gpuguard")


def stray_findings(facts: HostFacts) -> Iterator[Finding]:
    """Two suffixes of one module in one folder, old backups below updates/, leftover trees."""
    for kernel in facts.kernels:
        if kernel.image is None:
            in_use = kernel.release in (facts.running, facts.next.release)
            if not in_use and any(module.file or module.others for module in kernel.modules):
                yield _leftover(kernel)
            continue
        yield from _two_suffixes(kernel)
        yield from _backups_in_tree(kernel)


def stray_backups(kernel: KernelFacts) -> tuple[str, ...]:
    """Paths of NVIDIA modules below ``updates/`` that neither DKMS nor we put there.

    depmod takes any of them for the real one, by directory order (CASES C20).
    """
    prefix = f"/lib/modules/{kernel.release}/"
    found = []
    for path in _paths(kernel, with_packaged=False):
        inside = path.removeprefix("/usr").removeprefix(prefix)
        folder = str(PurePosixPath(inside).parent)
        if inside.startswith("updates/") and folder not in _OWNED_FOLDERS and folder != "updates":
            found.append(path)
    return tuple(found)


def _paths(kernel: KernelFacts, *, with_packaged: bool = True) -> list[str]:
    files = [
        file
        for module in kernel.modules
        for file in ((module.file,) if module.file else ()) + module.others
    ]
    return sorted({file.path for file in files if with_packaged or not file.packaged})


def _leftover(kernel: KernelFacts) -> Finding:
    return Finding(
        code="leftover-module-tree",
        severity=Severity.WARNING,
        subject=kernel.release,
        message=f"/lib/modules/{kernel.release} holds NVIDIA modules but its kernel is gone",
        remedy=f"if that kernel is really removed: rm -r /lib/modules/{kernel.release}",
    )


def _two_suffixes(kernel: KernelFacts) -> Iterator[Finding]:
    groups: dict[str, list[str]] = defaultdict(list)
    for path in _paths(kernel):
        groups[path.split(".ko", 1)[0]].append(path)
    for paths in groups.values():
        if len(paths) > 1:
            yield Finding(
                code="module-two-suffixes",
                severity=Severity.WARNING,
                subject=kernel.release,
                message=f"one module twice in a folder, depmod may take either: {', '.join(paths)}",
                remedy="remove the older file, then: depmod " + kernel.release,
            )


def _backups_in_tree(kernel: KernelFacts) -> Iterator[Finding]:
    if paths := stray_backups(kernel):
        yield Finding(
            code="backup-in-module-tree",
            severity=Severity.WARNING,
            subject=kernel.release,
            message=f"copies below updates/ compete with the real modules: {', '.join(paths)}",
            remedy=(
                f"gpuguard rebuild --kernel {kernel.release} moves them into its backups; "
                "or move them out of /lib/modules yourself"
            ),
        )
