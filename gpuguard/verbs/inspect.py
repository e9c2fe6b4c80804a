"""Look and judge: the use case behind ``status`` and ``plan``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuguard.accepted import read_accepted
from gpuguard.apply.journal import Journal
from gpuguard.apply.lock import is_held
from gpuguard.build.inputs import BuildInputs, InputsProbe
from gpuguard.config import Config
from gpuguard.config_file import InvalidConfigError, read_config
from gpuguard.config_yaml import Problem
from gpuguard.core.assess import Assessment, assess
from gpuguard.core.expectation import Expectation
from gpuguard.core.facts import HostFacts
from gpuguard.core.findings import Finding, Severity, verdict_of
from gpuguard.core.plan import Plan, Request, plan
from gpuguard.core.policy import Policy
from gpuguard.core.window import WindowFacts
from gpuguard.errors import ConfigError, StateError, UsageError
from gpuguard.host import Host
from gpuguard.host.cache import FileCache, cache_file
from gpuguard.probes.host import probe_host
from gpuguard.probes.modules_config import modules_config_fingerprint
from gpuguard.records import recorded_releases
from gpuguard.state import MODULE_CACHE_FILE
from gpuguard.verbs.clock import seconds_since
from gpuguard.verbs.expected import expectation_of
from gpuguard.verbs.holds import hold_policy
from gpuguard.window import Phase, read_window


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what it was made from; ``inputs`` per release."""

    request: Request
    facts: HostFacts
    plan: Plan
    inputs: dict[str, BuildInputs]


def policy_of(config: Config | None, accepted: Expectation | None = None) -> Policy:
    """The operator's intent; without a configuration the defaults."""
    return Policy(
        ignored_kernels=config.kernels.ignore if config is not None else (),
        expected=expectation_of(config, accepted),
        holds=hold_policy(config),
    )


def look(
    host: Host,
    config: Config | None,
    *,
    with_p2p: bool = True,
    with_dkms: bool = False,
    strict: bool = True,
) -> HostFacts:
    """Probe the host, remembering files that have not changed."""
    file = cache_file(host.path(MODULE_CACHE_FILE))
    cache = FileCache(file)
    signing = config.signing if config is not None else None
    facts = probe_host(
        host,
        cache,
        signing_key=signing.key if signing else None,
        signing_certificate=signing.certificate if signing else None,
        with_p2p=with_p2p,
        with_dkms=with_dkms,
        strict=strict,
    )
    cache.save()
    return replace(
        facts,
        interrupted=_interrupted(host),
        window=_window(host),
        modules_config=modules_config_fingerprint(host),
        holds=replace(facts.holds, at_work=is_held(host)),
    )


def _window(host: Host) -> WindowFacts | None:
    try:
        window = read_window(host)
    except StateError as error:
        return WindowFacts(problem=error.message)
    if window is None:
        return None
    return WindowFacts(
        id=window.id,
        phase=window.phase.value,
        started=window.started,
        since=window.since,
        seconds=seconds_since(window.since),
        outcome=window.outcome,
        is_waiting=window.phase is Phase.WAITING,
        is_left=window.phase.is_open and not is_held(host),
        holds_are_off=window.phase.holds_are_off,
    )


def _interrupted(host: Host) -> str | None:
    if is_held(host):
        return None  # under way, not interrupted
    try:
        state = Journal(host).read()
    except StateError as error:
        return f"a change ({error.message})"
    return None if state is None else f"the {state.verb} of {state.release}"


def configured(host: Host, file: str) -> tuple[Config | None, Finding | None]:
    """The configuration, or what is wrong with it: a typo must not hide an unsafe reboot."""
    try:
        return read_config(host, file), None
    except ConfigError as error:
        return None, _trouble(error)


def _trouble(error: ConfigError) -> Finding:
    if isinstance(error, InvalidConfigError):
        severity, evidence = Severity.WARNING, {_place(p): p.message for p in error.problems}
    else:
        # "unreadable" has no detail; an untrusted one: a line per file
        severity = Severity.WARNING if error.code == "config-untrusted" else Severity.UNKNOWN
        lines = (line.partition(": ") for line in error.detail.splitlines())
        evidence = {file: reason for file, _, reason in lines}
    return Finding(
        code=error.code,
        severity=severity,
        subject="configuration",
        message=f"{error.message}; the host is judged by the defaults",
        remedy="; ".join(error.hint.splitlines()),
        evidence=evidence,
    )


def _place(problem: Problem) -> str:
    return f"{problem.file}: {problem.key}" if problem.key else problem.file


def judge(
    host: Host, config: Config | None, *, with_dkms: bool = False, trouble: Finding | None = None
) -> tuple[HostFacts, Assessment]:
    """Facts and what is to be thought of them; ``trouble``: of the configuration itself."""
    facts = look(host, config, with_dkms=with_dkms, strict=False)
    return facts, judge_facts(host, facts, config, trouble)


def judge_facts(
    host: Host, facts: HostFacts, config: Config | None, trouble: Finding | None = None
) -> Assessment:
    """What is to be thought of facts; see ``judge``."""
    assessment = assess(facts, policy_of(config, read_accepted(host)))
    if trouble is None:
        return assessment
    findings = (*assessment.findings, trouble)
    return replace(assessment, findings=findings, verdict=verdict_of(findings))


def make_plan(host: Host, config: Config, request: Request) -> Planned:
    """Decide what ``rebuild`` would do, and find out what is in its way.

    Raises:
        UsageError: a kernel was asked for that is not installed.
    """
    facts = look(host, config, with_p2p=False)
    installed = {k.release: k for k in facts.kernels if k.image is not None}
    for release in request.releases or ():
        if release not in installed:
            raise UsageError(
                f"kernel {release} is not installed",
                code="no-such-kernel",
                hint=f"installed: {', '.join(installed) or 'none'}",
            )
    version = config.driver_version or facts.driver.userland
    policy = policy_of(config)
    wanted = [
        kernel
        for kernel in installed.values()
        if (request.releases is None and policy.looks_after(kernel.release))
        or kernel.release in (request.releases or ())
    ]
    probe = InputsProbe(host, config, version, facts.secure_boot)
    inputs = {kernel.release: probe.for_kernel(kernel) for kernel in wanted}
    decided = plan(facts, policy, request, inputs, recorded=recorded_releases(host))
    return Planned(request=request, facts=facts, plan=decided, inputs=inputs)


def next_release(facts: HostFacts) -> str:
    """The kernel that boots next.

    Raises:
        UsageError: it cannot be told.
    """
    if facts.next.release is None:
        raise UsageError(
            f"which kernel boots next could not be told: {facts.next.reason}",
            code="next-kernel-unknown",
            hint="name one: --kernel RELEASE",
        )
    return facts.next.release
