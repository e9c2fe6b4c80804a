"""Checks of what the kernel said, and of virtualisation and lockdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpuguard.core.assess import Assessment
from gpuguard.core.doctor_check import Cause, Check, conclude, not_read
from gpuguard.core.doctor_facts import DoctorFacts, LogFault, Unread
from gpuguard.core.facts import HostFacts, SecureBootState
from gpuguard.core.findings import Severity

#: Faults of the program that runs, not of the card: NVIDIA's Xid catalogue. 13 graphics
#: engine exception, 31 page fault of the GPU's MMU, 43 reset channel, 45 preempted clean-up.
_PROGRAM_XIDS = (13, 31, 43, 45)
_EMULATORS = ("qemu", "vmware", "virtualbox", "innotek", "xen", "bochs", "parallels", "openstack")


def check_log(facts: DoctorFacts) -> Check:
    """Nothing in this boot's kernel log names a card as lost or faulty."""
    log = facts.log
    if log.source is None:
        place = Unread("the kernel's log", log.problem)
        return conclude("log", "", [not_read("kernel log", place, code="log-unknown")])
    ours = [f for f in log.faults if f.kind != "xid" or f.xid not in _PROGRAM_XIDS]
    notes = [
        f"{fault.card}: Xid {fault.xid}, a fault of a program, {fault.count} times, "
        f"last {fault.time or 'at an unknown time'}"
        for fault in log.faults
        if fault not in ours
    ]
    others = _other_devices(facts)
    causes = [_log_cause(f, log.source) for f in _worth_telling(ours) if not others(f)]
    return conclude("log", f"{log.source}: no fault since boot", causes, notes)


def _other_devices(facts: DoctorFacts) -> Callable[[LogFault], bool]:
    """Tells the IOMMU's faults of devices that are no cards: it also watches disks and nets."""
    cards = facts.cards if isinstance(facts.cards, tuple) else ()
    known = {card.bus_id for card in cards}
    return lambda fault: fault.kind == "page-fault" and bool(known) and fault.card not in known


def _worth_telling(faults: list[LogFault]) -> Iterator[LogFault]:
    """Without "the probe routine failed" where a card is named that explains it."""
    named = any(fault.card for fault in faults)
    for fault in faults:
        if fault.card or not named:
            yield fault


def _log_cause(fault: LogFault, source: str) -> Cause:
    sentence = _SENTENCES[fault.kind]
    return Cause(
        code=sentence.code,
        severity=Severity.WARNING if fault.kind == "xid" else Severity.CRITICAL,
        subject=fault.card or "driver",
        message=sentence.message.format(xid=fault.xid),
        remedy=sentence.remedy,
        source=source,
        evidence={
            "line": fault.text[:200],
            "time": fault.time or "unknown",
            "count": str(fault.count),
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sentence:
    code: str
    message: str
    remedy: str


_SENTENCES = {
    "fallen-off": _Sentence(
        code="card-fallen-off",
        message="the card has fallen off the bus: it no longer answers",
        remedy="power it off and on; if it returns: power supply, riser, slot or heat",
    ),
    "xid": _Sentence(
        code="card-xid",
        message="the driver reported Xid {xid}",
        remedy="look the number up in NVIDIA's Xid catalogue; hardware is suspect if it repeats",
    ),
    "page-fault": _Sentence(
        code="iommu-page-fault",
        message="the IOMMU stopped accesses of this card: peer writes do not arrive",
        remedy="iommu=pt on the kernel's command line; see the check iommu",
    ),
    "bound": _Sentence(
        code="card-claimed",
        message="another driver had claimed this card when nvidia loaded",
        remedy="blacklist that driver and reboot; see the check cards",
    ),
    "init-failed": _Sentence(
        code="card-init-failed",
        message="the driver could not initialise a card",
        remedy="see the lines before it in the log; power the machine off and on",
    ),
}


def check_virt(facts: DoctorFacts) -> Check:
    """On bare metal; in a guest a grant proves little (CASES C14)."""
    virt = facts.virt
    notes = [f"inside a container ({virt.container})"] if virt.container else []
    machine = " ".join(filter(None, (virt.vendor, virt.product))) or "unnamed machine"
    emulated = any(word in machine.lower() for word in _EMULATORS)
    if virt.hypervisor is None and not (virt.vendor or virt.product):
        place = Unread("/proc/cpuinfo, /sys/class/dmi/id", "neither tells")
        return conclude(
            "virt", "", [not_read("machine", place, "run it on the host", code="virt-unknown")]
        )
    if not virt.hypervisor and not emulated:
        return conclude("virt", f"bare metal ({machine})", notes=notes)
    causes = [_virtualised(machine)] if len(facts.own_cards()) > 1 else []
    fine = f"a virtual machine ({machine})"
    return conclude("virt", fine, causes, notes)


def _virtualised(machine: str) -> Cause:
    return Cause(
        code="virtualised",
        severity=Severity.WARNING,
        subject="machine",
        message=f"this is a virtual machine ({machine}): a hypervisor can assert P2P without a "
        "path for it, and bytes then come back to their writer",
        remedy="gpuguard verify --deep reads on the destination card and proves it; ACS, IOMMU "
        "and link are the hypervisor's",
        source="/proc/cpuinfo, /sys/class/dmi/id",
        evidence={"machine": machine},
    )


def check_secure_boot(facts: DoctorFacts, assessment: Assessment | None) -> Check:
    """Neither Secure Boot nor lockdown keeps our modules out."""
    causes = list(_secure_boot_causes(facts, assessment))
    notes = []
    if isinstance(facts.lockdown, str) and facts.lockdown != "none":
        notes.append(
            f"kernel lockdown is {facts.lockdown}: unsigned modules are refused, setpci may be too"
        )
    state = facts.host.secure_boot.state if isinstance(facts.host, HostFacts) else None
    word = "not applicable (no EFI)" if state is SecureBootState.NOT_APPLICABLE else str(state)
    lockdown = facts.lockdown if isinstance(facts.lockdown, str) else "not there"
    return conclude("secure-boot", f"Secure Boot {word}, lockdown {lockdown}", causes, notes)


def _secure_boot_causes(facts: DoctorFacts, assessment: Assessment | None) -> Iterator[Cause]:
    if assessment is None and isinstance(facts.host, Unread):
        yield not_read("firmware", facts.host, code="secure-boot-unknown")
    for finding in assessment.findings if assessment else ():
        if finding.code.startswith("secure-boot"):
            yield Cause(
                code=finding.code,
                severity=finding.severity,
                subject=finding.subject,
                message=finding.message,
                remedy=finding.remedy,
                evidence=finding.evidence,
                source="/sys/firmware/efi/efivars",
            )
    if isinstance(facts.lockdown, Unread):
        yield not_read("kernel", facts.lockdown, code="secure-boot-unknown")
