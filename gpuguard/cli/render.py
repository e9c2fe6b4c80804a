"""Text for people: tables, marks, findings. Colour only on a terminal (typer strips it)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import typer

from gpuguard.core.assess import Assessment
from gpuguard.core.document import disk_version, kernel_of, roles_of
from gpuguard.core.facts import HostFacts, Identity, KernelFacts, SecureBootState
from gpuguard.core.findings import Finding, Severity, Verdict
from gpuguard.core.holds import HoldState

_VERDICT_COLOUR = {
    Verdict.OK: typer.colors.GREEN,
    Verdict.WARNING: typer.colors.YELLOW,
    Verdict.UNKNOWN: typer.colors.MAGENTA,
    Verdict.CRITICAL: typer.colors.RED,
}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # what typer.style adds
#: What a terminal obeys instead of showing it: C0, DEL, C1, and changes of direction.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]")
_SHOWN_EVIDENCE = 4  # 12 pairs that say the same fill a screen
_SHORT_ID = 12  # digits of a build-id that tell modules apart on a screen


def coloured(text: str, verdict: Verdict) -> str:
    """Text in the colour of a verdict."""
    return typer.style(text, fg=_VERDICT_COLOUR[verdict], bold=True)


def shown(text: str) -> str:
    """Text of the host, a module's or a program's, with what a terminal would obey escaped."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed, two blanks between; escape codes do not count as width."""
    widths = [max(len(_unstyled(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell + " " * (width - len(_unstyled(cell)))
            for cell, width in zip(row, widths, strict=True)
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _unstyled(text: str) -> str:
    return _ESCAPE.sub("", text)


def status_text(facts: HostFacts, assessment: Assessment, *, verbose: bool) -> str:
    """Everything that ``gpuguard status`` shows."""
    parts = [coloured(f"gpuguard: {assessment.verdict}", assessment.verdict)]
    if rows := _kernel_rows(facts, assessment):
        parts.append(table(rows))
    if verbose:
        parts += [_modules_text(kernel) for kernel in facts.kernels if kernel.image]
        if facts.dkms:
            parts.append(_dkms_text(facts))
    parts.append(table(list(_summary_rows(facts, assessment))))
    if assessment.findings:
        parts.append(findings_text(assessment.findings))
    return "\n\n".join(parts)


def findings_text(findings: Iterable[Finding]) -> str:
    """One block per finding, worst first: what, evidence, what to do."""
    order = (Severity.CRITICAL, Severity.UNKNOWN, Severity.WARNING)
    blocks = []
    for finding in sorted(findings, key=lambda f: order.index(f.severity)):
        verdict = Verdict(finding.severity.value)
        head = coloured(finding.severity.upper(), verdict)
        lines = [f"{head} {shown(f'{finding.subject}: {finding.message}')} [{finding.code}]"]
        evidence = list(finding.evidence.items())
        lines += [f"     {shown(f'{key}: {value}')}" for key, value in evidence[:_SHOWN_EVIDENCE]]
        if len(evidence) > _SHOWN_EVIDENCE:
            lines.append(f"     and {len(evidence) - _SHOWN_EVIDENCE} more (--json shows all)")
        if finding.remedy:
            remedy = map(shown, finding.remedy.split("\n"))  # some have lines of a file
            lines.append("  -> " + "\n".join(remedy))
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def _kernel_rows(facts: HostFacts, assessment: Assessment) -> list[list[str]]:
    rows = [["kernel", "role", "ready", "modules", "headers", "initramfs"]]
    for kernel in facts.kernels:
        if kernel.image is None:
            continue
        ready = assessment.is_ready(kernel.release)
        mark = coloured("yes", Verdict.OK) if ready else coloured("NO", Verdict.CRITICAL)
        rows.append(
            [
                kernel.release,
                ", ".join(roles_of(kernel.release, facts)) or "-",
                mark,
                modules_word(kernel),
                kernel.headers.state.value,
                kernel.initramfs.state.value,
            ]
        )
    return rows if len(rows) > 1 else []


def modules_word(kernel: KernelFacts) -> str:
    """``patched``, ``stock``, ``missing``, or how many of each."""
    if kernel.problem is not None:
        return "unknown"
    kinds = [module.identity for module in kernel.modules if module.file is not None]
    if not kinds:
        return Identity.MISSING.value
    if len(set(kinds)) == 1:
        return kinds[0].value
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


def _modules_text(kernel: KernelFacts) -> str:
    rows = [[kernel.release, "identity", "build-id", "version", "file"]]
    for module in kernel.modules:
        file = module.file
        rows.append(
            [
                module.name,
                module.identity.value,
                (file.build_id or "-")[:_SHORT_ID] if file else "-",
                shown(file.version or "-") if file else "-",
                shown(file.path) if file else "-",
            ]
        )
        for other in module.others:
            words = ("competes", (other.build_id or "-")[:_SHORT_ID], other.version or "-")
            rows.append(["", *map(shown, words), shown(other.path)])
    return table(rows)


def _dkms_text(facts: HostFacts) -> str:
    """DKMS's own words; with ours in place its "Diff" remark is the good state."""
    rows = [["DKMS says", "kernel", "state"]]
    for entry in facts.dkms:
        state = f"{entry.state} ({entry.remark})" if entry.remark else entry.state
        rows.append(
            [shown(w) for w in (f"{entry.module}/{entry.version}", entry.release or "-", state)]
        )
    return table(rows)


def _summary_rows(facts: HostFacts, assessment: Assessment) -> Iterable[list[str]]:
    driver = facts.driver
    loaded = f"{driver.loaded or 'none'} ({assessment.loaded_identity})"
    disk = (
        f"on disk: running {disk_version(kernel_of(facts, facts.running)) or '-'}, "
        f"next {disk_version(kernel_of(facts, facts.next.release)) or '-'}"
    )
    yield ["driver", shown(f"userland {driver.userland or 'none'}, loaded {loaded}, {disk}")]
    yield ["P2P", p2p_line(facts, assessment)]
    boot = facts.next.release or f"unknown: {facts.next.reason}"
    yield ["next boot", shown(f"{boot} ({facts.next.source})")]
    if facts.secure_boot.state is not SecureBootState.NOT_APPLICABLE:
        yield ["Secure Boot", facts.secure_boot.state.value]
    yield ["holds", holds_line(assessment.holds)]
    reboot = assessment.reboot
    safe = coloured("safe", Verdict.OK) if reboot.safe else coloured("NOT safe", Verdict.CRITICAL)
    required = "required" if reboot.required else "not required"
    why = reboot.reasons[0].removeprefix("not safe: ") if reboot.reasons else ""
    yield ["reboot", f"{safe}, {required}" + (f"; {shown(why)}" if why else "")]


def p2p_line(facts: HostFacts, assessment: Assessment) -> str:
    """``12 of 12 ordered pairs OK, 4 cards (nvml)``, or why nobody can say."""
    p2p = facts.p2p
    if p2p.source is None:
        return shown(f"unknown: {p2p.problem}") if p2p.problem else "unknown"
    good = sum(pair.read == "OK" and pair.write == "OK" for pair in p2p.pairs)
    verdict = Verdict.OK if assessment.p2p_healthy else Verdict.CRITICAL
    text = f"{good} of {len(p2p.pairs)} ordered pairs OK"
    return f"{coloured(text, verdict)}, {len(p2p.gpus)} cards ({p2p.source})"


def holds_line(state: HoldState) -> str:
    """One line: whether holding is on, how many, and what they cost."""
    if state.problem is not None:
        return shown(f"unknown: {state.problem}")
    words = ["holding is on" if state.active else "holding is off (gpuguard hold)"]
    words.append(f"{len(state.held)} on hold")
    if state.foreign:
        words.append(f"{len(state.foreign)} of them by others")
    if lost := len({*state.drifted, *state.missing, *state.lifted}):
        words.append(f"{lost} not on hold that should be")
    if state.withheld:
        fixes = sum(one.security for one in state.withheld)
        number = len(state.withheld)
        words.append(
            f"{number} upgrade{'' if number == 1 else 's'} withheld"
            + (f" ({fixes} security)" if fixes else "")
        )
    return ", ".join(words)
