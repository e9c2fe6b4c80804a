"""Why is there no (good) P2P: every check of the doctor, and what they come to together.

Facts in, checks out; nothing here asks or changes anything. A place that could not be looked
at makes its check ``unknown``, never ``ok``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuguard.core.assess import Assessment, assess
from gpuguard.core.doctor_bus import check_acs, check_bar1, check_cards, check_iommu
from gpuguard.core.doctor_check import Cause, Check, CheckState
from gpuguard.core.doctor_driver import (
    check_flavour,
    check_grant,
    check_module,
    check_nodes,
    check_options,
)
from gpuguard.core.doctor_facts import DoctorFacts, Unread
from gpuguard.core.doctor_link import check_display, check_link
from gpuguard.core.doctor_log import check_log, check_secure_boot, check_virt
from gpuguard.core.doctor_serving import check_nccl, check_vllm_cache
from gpuguard.core.findings import Verdict, verdict_of
from gpuguard.core.policy import Policy

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Every check in the order in which they are shown."""

    verdict: Verdict
    checks: tuple[Check, ...]

    @property
    def causes(self) -> tuple[Cause, ...]:
        """All findings of all checks."""
        return tuple(cause for check in self.checks for cause in check.causes)

    @property
    def exit_status(self) -> int:
        """0 nothing wrong, 1 problems, 3 only unknowns stand in the way."""
        states = {check.state for check in self.checks}
        if CheckState.PROBLEM in states:
            return 1
        return 3 if CheckState.UNKNOWN in states else 0


def diagnose(facts: DoctorFacts, policy: Policy) -> Diagnosis:
    """Run every check."""
    judged = None if isinstance(facts.host, Unread) else assess(facts.host, policy)
    checks = _checks(facts, judged)
    causes = [cause for check in checks for cause in check.causes]
    return Diagnosis(verdict=verdict_of(causes), checks=checks)


def _checks(facts: DoctorFacts, judged: Assessment | None) -> tuple[Check, ...]:
    return (
        check_cards(facts),
        check_module(facts, judged),
        check_flavour(facts, judged),
        check_grant(facts, judged),
        check_options(facts),
        check_nodes(facts),
        check_iommu(facts),
        check_acs(facts),
        check_bar1(facts),
        check_link(facts),
        check_display(facts),
        check_log(facts),
        check_virt(facts),
        check_secure_boot(facts, judged),
        check_nccl(facts, judged),
        check_vllm_cache(facts, judged),
    )


def doctor_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """The machine-readable answer (resources/schema/doctor.schema.json)."""
    return {
        "schema": SCHEMA,
        "verdict": diagnosis.verdict.value,
        "checks": [
            {
                "name": check.name,
                "state": check.state.value,
                "summary": check.summary,
                "notes": list(check.notes),
                "findings": [_cause(cause) for cause in check.causes],
            }
            for check in diagnosis.checks
        ],
    }


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "code": cause.code,
        "severity": cause.severity.value,
        "subject": cause.subject,
        "message": cause.message,
        "remedy": cause.remedy,
        "evidence": cause.evidence,
        "source": cause.source,
    }
