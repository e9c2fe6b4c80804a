"""Facts in, verdict out: the decision behind ``verify``.

The driver's *grant* is judged here. That bytes arrive is another matter (``verify --deep``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuguard.core.expectation import Expectation, Origin
from gpuguard.core.facts import DriverFacts, P2pFacts
from gpuguard.core.findings import Finding, Severity, Verdict, verdict_of
from gpuguard.core.p2p import Grant, is_ok, p2p_findings, p2p_healthy
from gpuguard.core.p2p_merge import disagreements, merged
from gpuguard.core.p2p_reasons import OUTSTANDING, REMEDIES, TIMEOUT


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFacts:
    """What was asked and what it is held against.

    ``answers`` maps who was asked (``nvml``, ``nvidia-smi``) to the answer, ``on_bus`` every
    NVIDIA display device's PCI bus id to the kernel driver that holds it. ``guest`` is the
    virtual machine's name, None on bare metal.
    """

    answers: Mapping[str, P2pFacts]
    on_bus: Mapping[str, str | None]
    driver: DriverFacts
    loaded: str  # loaded_identity
    guest: str | None
    expected: Expectation


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The grant judged; ``sources`` are those that answered."""

    verdict: Verdict
    healthy: bool | None
    findings: tuple[Finding, ...]
    grant: Grant
    sources: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """0: every expected pair is OK; 1: looked at, and not healthy; 3: could not look."""
        return {Verdict.CRITICAL: 1, Verdict.UNKNOWN: 3}.get(self.verdict, 0)


def verify(facts: VerifyFacts) -> Verification:
    """Judge what the sources say, together."""
    grant = Grant(
        p2p=merged(facts.answers),
        expected=facts.expected.on_bus(tuple(facts.on_bus)),
        on_bus=facts.on_bus,
        loaded=facts.loaded,
        flavour=facts.driver.flavour,
    )
    differences = disagreements(facts.answers)
    sources = tuple(name for name, answer in facts.answers.items() if answer.source is not None)
    findings = (
        *p2p_findings(grant),
        *_disagreement(differences),
        *(_hangs(facts.answers) if sources else ()),
        *_strangers(grant),
        *_guest(facts, grant),
    )
    healthy = p2p_healthy(grant)
    return Verification(
        verdict=verdict_of(findings),
        healthy=False if healthy and differences else healthy,
        findings=findings,
        grant=grant,
        sources=sources,
    )


def refusal(verification: Verification) -> str | None:
    """Why a state must not be accepted as right; None: it may."""
    grant = verification.grant
    if grant.p2p.source is None:
        return f"nothing could be looked at: {grant.p2p.problem}"
    if not grant.seen:
        return "there is no card"
    if any(finding.code == "p2p-sources-disagree" for finding in verification.findings):
        return "NVML and nvidia-smi say different things"
    count = len(grant.seen)
    mine = {gpu.uuid for gpu in grant.seen}
    pairs = [pair for pair in grant.p2p.pairs if pair.src in mine and pair.dst in mine]
    if len(pairs) != count * (count - 1):
        return f"{len(pairs)} of {count * (count - 1)} ordered pairs were reported"
    if pairs and not any(map(is_ok, pairs)):
        return "no pair of cards has P2P: there is nothing to keep"
    return None


def acceptable_pairs(verification: Verification) -> tuple[tuple[str, str], ...]:
    """The pairs to expect from now on: those that are OK now."""
    mine = {gpu.uuid for gpu in verification.grant.seen}
    return tuple(
        (pair.src, pair.dst)
        for pair in verification.grant.p2p.pairs
        if is_ok(pair) and pair.src in mine and pair.dst in mine
    )


def _disagreement(differences: dict[str, str]) -> Iterator[Finding]:
    if differences:
        yield Finding(
            code="p2p-sources-disagree",
            severity=Severity.CRITICAL,
            subject="p2p",
            message="NVML and nvidia-smi do not say the same, so neither is to be believed",
            remedy="do libnvidia-ml and nvidia-smi come from one driver package? gpuguard status; "
            "do indexes shift because a card comes and goes? dmesg",
            evidence=differences,
        )


def _hangs(answers: Mapping[str, P2pFacts]) -> Iterator[Finding]:
    """One source hangs although the other one has answered."""
    for name, answer in answers.items():
        if answer.reason in (TIMEOUT, OUTSTANDING):
            stuck = answer.reason == OUTSTANDING
            yield Finding(
                code="probe-outstanding" if stuck else "probe-timeout",
                severity=Severity.CRITICAL if stuck else Severity.WARNING,
                subject=name,
                message=answer.problem or "",
                remedy=REMEDIES[answer.reason],
            )


def _strangers(grant: Grant) -> Iterator[Finding]:
    """Cards that nobody expects: seen by the driver, or on the PCI bus alone."""
    if grant.p2p.source is None:
        return
    for gpu in grant.expected.unexpected(grant.seen):
        yield Finding(
            code="card-unexpected",
            severity=Severity.WARNING,
            subject=gpu.pci_bus_id or gpu.uuid,
            message=f"{gpu.name} ({gpu.uuid}) is not among the expected cards",
            remedy=_correct_expectation(grant),
        )
    missing = grant.expected.shortage(grant.seen)
    known = {gpu.pci_bus_id for gpu in grant.p2p.gpus} | {name for name, _ in grant.p2p.lost}
    for bus_id, driver in grant.on_bus.items():
        if bus_id not in known and bus_id not in grant.expected.exclude and not missing:
            yield Finding(
                code="card-not-driven",
                severity=Severity.WARNING,
                subject=bus_id,
                message="a card on the PCI bus that the driver does not see and nobody expects, "
                f"held by {driver or 'no driver'}",
                remedy=f"if it is meant for something else, list it in p2p.exclude; "
                f"else {_correct_expectation(grant)}",
            )


def _correct_expectation(grant: Grant) -> str:
    if grant.expected.origin is Origin.ACCEPTED:
        return "if this is right: gpuguard verify --accept"
    return "correct p2p.gpus, p2p.groups or p2p.expected_gpus in the configuration"


def _guest(facts: VerifyFacts, grant: Grant) -> Iterator[Finding]:
    if facts.guest is not None and len(grant.seen) > 1:
        yield Finding(
            code="virtualised",
            severity=Severity.WARNING,
            subject="machine",
            message=f"this is a virtual machine ({facts.guest}): a hypervisor can assert P2P "
            "without a path for it, so a grant proves nothing here",
            remedy="only gpuguard verify --deep proves a data path",
        )
