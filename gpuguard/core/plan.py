"""Facts and policy in, steps out: the decision behind ``plan`` and ``rebuild``.

A dry run prints these steps; a real run carries them out. The target release is always
named in the step: what runs now is never an implicit input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Protocol

from gpuguard.core.facts import (
    BuildFailure,
    BuildRecord,
    HostFacts,
    InitramfsState,
    KernelFacts,
)
from gpuguard.core.policy import Policy
from gpuguard.core.readiness import Obstacle, obstacles
from gpuguard.core.stray import stray_backups


class Blocker(Protocol):
    """Why a build for a kernel cannot even start."""

    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def hint(self) -> str: ...
    @property
    def exit_status(self) -> int: ...


class Inputs(Protocol):
    """What a build for a kernel would be made from; see ``build.inputs``."""

    @property
    def inputs(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def blockers(self) -> tuple[Blocker, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for; ``releases`` None: every kernel that is not ready.

    ``automatic``: nobody asked, so that a kernel which the operator rolled back is left alone.
    """

    releases: tuple[str, ...] | None = None
    force: bool = False
    automatic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """Build and install the patched modules for one kernel.

    ``blockers`` non-empty: it is due but cannot start; each has its remedy.
    """

    release: str
    reasons: tuple[str, ...]
    blockers: tuple[Blocker, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshInitramfs:
    """The modules are right, only the initramfs carries old ones."""

    release: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Nothing is done for this kernel, and why; ``is_ready`` False: nothing would help."""

    release: str
    reason: str
    is_ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """The kernel went away: remove our records and depmod configuration for it."""

    release: str


Step = Rebuild | RefreshInitramfs | Leave | Forget


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps in the order in which they are carried out; next kernel first."""

    steps: tuple[Step, ...] = field(default=())

    @property
    def is_converged(self) -> bool:
        """True if nothing needs doing."""
        return all(isinstance(step, Leave) for step in self.steps)

    @property
    def is_ready(self) -> bool:
        """True if no kernel is left alone although it is not ready."""
        return all(step.is_ready for step in self.steps if isinstance(step, Leave))


def plan(
    facts: HostFacts,
    policy: Policy,
    request: Request,
    inputs: Mapping[str, Inputs],
    *,
    recorded: tuple[str, ...] = (),
) -> Plan:
    """Decide what to do for each kernel.

    Args:
        facts: the host as probed.
        policy: the operator's intent.
        request: which kernels, and whether to insist.
        inputs: per release, what a build would be made from now.
        recorded: releases that we hold records or configuration for.
    """
    kernels = sorted(
        (k for k in facts.kernels if k.image is not None and _is_wanted(k, policy, request)),
        key=lambda kernel: kernel.release != facts.next.release,  # the next boot comes first
    )
    steps: list[Step] = [_step(kernel, facts, request, inputs) for kernel in kernels]
    if request.releases is None:
        steps += [Forget(release=release) for release in recorded if is_gone(release, facts)]
    return Plan(steps=tuple(steps))


def is_gone(release: str, facts: HostFacts) -> bool:
    """True if a kernel that we know of was purged: neither an image nor modules of its own.

    An image that is not seen proves nothing (/boot not mounted, images on the ESP alone), and
    while the next kernel is not known none is given up.
    """
    if facts.next.release is None or release in (facts.running, facts.next.release):
        return False
    kernel = next((k for k in facts.kernels if k.release == release), None)
    return kernel is None or (kernel.image is None and not kernel.has_own_modules)


def _is_wanted(kernel: KernelFacts, policy: Policy, request: Request) -> bool:
    if request.releases is not None:
        return kernel.release in request.releases
    return policy.looks_after(kernel.release)


def _step(
    kernel: KernelFacts,
    facts: HostFacts,
    request: Request,
    inputs: Mapping[str, Inputs],
) -> Step:
    found = obstacles(kernel, facts.driver, facts.secure_boot)
    reasons = tuple(_reasons(kernel, found, request, inputs.get(kernel.release)))
    if not reasons:
        # a unified kernel image has no image file of its own that could be rebuilt
        if kernel.initramfs.state is InitramfsState.STALE and kernel.initramfs.path is not None:
            return RefreshInitramfs(release=kernel.release, reasons=_messages(found))
        why = "; ".join(_messages(found))
        return Leave(
            release=kernel.release,
            reason=f"not ready, and new modules would not help: {why}" if why else "ready",
            is_ready=not why,
        )
    if request.automatic and kernel.left_alone is not None:
        return Leave(
            release=kernel.release,
            reason=f"rolled back on {kernel.left_alone}: only a rebuild that you ask for patches "
            f"it again (gpuguard rebuild --kernel {kernel.release})",
            is_ready=not found,
        )
    now = inputs.get(kernel.release)
    failure = kernel.failure
    if failure and now and _same_inputs(failure, now, facts) and not request.force:
        return Leave(
            release=kernel.release,
            reason=(
                f"failed before with the same inputs [{failure.code}]: {failure.message}; "
                "--force tries again"
            ),
            is_ready=not found,
        )
    if now is not None and now.blockers and not found and not request.force:
        why = "; ".join(f"{blocker.message} [{blocker.code}]" for blocker in now.blockers)
        return Leave(
            release=kernel.release,
            reason=f"ready; {', '.join(reasons)}, but nothing can be built: {why}",
            is_ready=True,
        )
    return Rebuild(
        release=kernel.release, reasons=reasons, blockers=now.blockers if now is not None else ()
    )


def _reasons(
    kernel: KernelFacts, found: tuple[Obstacle, ...], request: Request, now: Inputs | None
) -> Iterator[str]:
    yield from (obstacle.message for obstacle in found if obstacle.rebuildable)
    if not any(obstacle.rebuildable for obstacle in found):
        if now is not None and kernel.records:
            yield from changed_inputs(_record_in_use(kernel), now)
        if stray := stray_backups(kernel):
            yield f"copies below updates/ compete with the real modules: {', '.join(stray)}"
        if double := _two_suffixes_of_ours(kernel):
            yield f"one module of ours twice in a folder, either may win: {double}"
        if request.force:
            yield "--force"


def _two_suffixes_of_ours(kernel: KernelFacts) -> str:
    """Ours only: a ``.ko`` beside a ``.ko.xz`` in DKMS's folder is DKMS's business."""
    seen: dict[str, str] = {}
    for module in kernel.modules:
        for file in (*((module.file,) if module.file else ()), *module.others):
            if PurePosixPath(file.path).parent.name != "gpuguard":
                continue
            stem = file.path.split(".ko", 1)[0]
            if stem in seen:
                return f"{seen[stem]}, {file.path}"
            seen[stem] = file.path
    return ""


def _same_inputs(failure: BuildFailure, now: Inputs, facts: HostFacts) -> bool:
    before = dict(failure.inputs)
    after = dict(now.inputs)
    if "modules_config" in before:  # another copy won after depmod: who wins is an input, too
        after["modules_config"] = facts.modules_config
    return before == after


def _record_in_use(kernel: KernelFacts) -> BuildRecord:
    """The record of what resolves now; by build-id, since a clock may have gone backwards."""
    resolved = {module.file.build_id for module in kernel.modules if module.file is not None}
    for record in reversed(kernel.records):
        if any(build_id in resolved for _, build_id in record.build_ids):
            return record
    return kernel.records[-1]


def changed_inputs(record: BuildRecord, now: Inputs) -> Iterator[str]:
    """What a build would be made from now that differs from what the record was made from."""
    before = dict(record.inputs)
    for key, value in now.inputs:
        # an input that cannot be read now (headers removed) is unknown, not changed
        if before.get(key) and value and before[key] != value:
            yield f"{key.replace('_', ' ')} changed since the last build"


def _messages(found: tuple[Obstacle, ...]) -> tuple[str, ...]:
    return tuple(obstacle.message for obstacle in found)
