"""Put back what resolved before: the use case behind ``rollback``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gpuguard.apply.actions import Action, PutFile
from gpuguard.apply.backups import Backup, get_backup, list_backups, prune, take
from gpuguard.apply.initramfs import check_initramfs_possible
from gpuguard.apply.install import (
    initramfs_actions,
    rollback_actions,
    touched_paths,
    uncover_actions,
)
from gpuguard.apply.lock import wait_for_package_tools
from gpuguard.apply.room import check_room, check_writable
from gpuguard.apply.transaction import apply
from gpuguard.config import Config
from gpuguard.core.facts import HostFacts, Identity, KernelFacts
from gpuguard.errors import UsageError
from gpuguard.host import Host
from gpuguard.left_alone import encode_left_alone, left_alone_file
from gpuguard.verbs.clock import now


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPlan:
    """Which backup goes back into which kernel."""

    kernel: KernelFacts
    backup: Backup


def plan_rollback(
    host: Host,
    facts: HostFacts,
    release: str | None,
    backup_id: str | None,
    *,
    stock: bool = False,
) -> RollbackPlan:
    """Choose the backup: the given one, else the newest of the kernel that differs from now.

    With ``stock`` only backups of unpatched modules count: after two rebuilds the newest
    that differs is the build before, not what the distribution brought.

    Raises:
        UsageError: no such kernel or backup, or the two do not belong together.
    """
    if backup_id is not None:
        backup = get_backup(host, backup_id)
        if release is not None and backup.release != release:
            raise UsageError(
                f"backup {backup_id} is of kernel {backup.release}, not of {release}",
                code="backup-of-other-kernel",
            )
        return RollbackPlan(kernel=_installed(facts, backup.release), backup=backup)
    kernel = _installed(facts, release or facts.next.release or facts.running)
    return RollbackPlan(kernel=kernel, backup=_newest_that_differs(host, kernel, stock=stock))


def roll_back(host: Host, config: Config | None, plan: RollbackPlan) -> str:
    """Do it; returns the id of the backup taken before, with which this can be undone.

    The caller holds the lock and has recovered an interrupted change.

    Raises:
        RollbackError: a backed-up content is gone or damaged; nothing was changed.
        VerifyError: modprobe did not answer as planned; the host is as before.
    """
    check_writable(host, plan.kernel)
    actions = rollback_actions(host, plan.kernel, plan.backup)  # verifies the contents first
    return _carry_out(host, config, plan.kernel, actions, f"before rollback to {plan.backup.id}")


def bring_stock_back(host: Host, config: Config | None, kernel: KernelFacts) -> str:
    """The distribution's own modules as they are now; as ``roll_back`` otherwise.

    Only where they are not there any more, a backup of them.

    Raises:
        UsageError: there is no such backup either. RollbackError, VerifyError: see ``roll_back``.
    """
    check_writable(host, kernel)
    actions = uncover_actions(host, kernel)
    if actions is None:
        backup = _newest_that_differs(host, kernel, stock=True)
        return roll_back(host, config, RollbackPlan(kernel=kernel, backup=backup))
    return _carry_out(host, config, kernel, actions, "before the stock modules came back")


def _carry_out(
    host: Host,
    config: Config | None,
    kernel: KernelFacts,
    actions: tuple[Action, ...],
    reason: str,
) -> str:
    timeout = config.lock_timeout_seconds if config is not None else 60.0
    os.umask(0o022)  # what depmod and initramfs tools write is for everyone to read
    wait_for_package_tools(host, timeout)
    if initramfs_actions(kernel) and kernel.initramfs.path is not None:
        check_initramfs_possible(kernel.release, kernel.initramfs.path, host)
    check_room(actions, host, kernel)
    created = now()
    before = take(
        host,
        kernel,
        reason=reason,
        created=created,
        paths=touched_paths(kernel, ()),
    )
    # Else the next automatic run would undo what he has just asked for.
    mark = PutFile(
        path=left_alone_file(kernel.release), source=encode_left_alone(kernel.release, created)
    )
    apply(
        (mark, *actions),
        host,
        verb="rollback",
        release=kernel.release,
        started=created,
        backup=before.id,
    )
    prune(host, keep=config.backups.keep if config is not None else 5)
    return before.id


def _installed(facts: HostFacts, release: str | None) -> KernelFacts:
    if release is None:
        raise UsageError(
            f"which kernel boots next could not be told: {facts.next.reason}",
            code="next-kernel-unknown",
            hint="name one: --kernel RELEASE",
        )
    for kernel in facts.kernels:
        if kernel.release == release and kernel.image is not None:
            return kernel
    names = ", ".join(k.release for k in facts.kernels if k.image is not None) or "none"
    raise UsageError(
        f"kernel {release} is not installed",
        code="no-such-kernel",
        hint=f"installed: {names}",
    )


def _newest_that_differs(host: Host, kernel: KernelFacts, *, stock: bool) -> Backup:
    current = {(m.name, m.file.build_id) for m in kernel.modules if m.file is not None}
    for backup in reversed(list_backups(host, kernel.release)):
        if stock and backup.identity != Identity.STOCK.value:
            continue
        if {(module.name, module.build_id) for module in backup.modules} != current:
            return backup
    raise UsageError(
        f"no {'stock ' if stock else ''}backup of {kernel.release} differs from what is there now",
        code="no-such-backup",
        hint="see: gpuguard backups",
    )
