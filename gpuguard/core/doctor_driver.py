"""Checks of the driver: which modules are loaded, of which version, with which options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpuguard.core.assess import Assessment
from gpuguard.core.doctor_check import Cause, Check, conclude, not_applicable, not_read
from gpuguard.core.doctor_facts import DoctorFacts, ModuleOption, Unread
from gpuguard.core.facts import HostFacts, KernelFacts
from gpuguard.core.findings import Finding, Severity

_VERSION_FILE = "/proc/driver/nvidia/version"
_NOTE_FILE = "/sys/module/nvidia/notes/.note.gnu.build-id"
_PARAMS = "/proc/driver/nvidia/params"
_NO_TREES = "there is no /lib/modules here (a container or sandbox): only the loaded module tells"


def check_module(facts: DoctorFacts, assessment: Assessment | None) -> Check:
    """The loaded module is ours, and fits userland, disk and firmware."""
    host = facts.host
    if isinstance(host, Unread):
        return conclude("module", "", [not_read("driver", host, code="module-unknown")])
    notes = [] if facts.has_module_trees else [_NO_TREES]
    driver = host.driver
    if driver.loaded is None and driver.loaded_build_id is None:
        return conclude("module", "", [_not_loaded(facts)], notes)
    findings = assessment.findings if assessment else ()
    wanted = ("loaded-stock", "loaded-unknown", "driver-library-mismatch")
    causes = [_as_cause(f, _NOTE_FILE) for f in findings if f.code in wanted]
    causes += _disk_mismatch(host)
    causes += _firmware_mismatch(facts, driver.loaded)
    identity = assessment.loaded_identity if assessment else "unknown"
    userland = f"userland {driver.userland}" if driver.userland else "no userland found"
    firmware = sorted({card.firmware for card in facts.own_cards() if card.firmware})
    gsp = f", GSP firmware {', '.join(firmware)}" if firmware else ""
    return conclude("module", f"{driver.loaded} ({identity}), {userland}{gsp}", causes, notes)


def _not_loaded(facts: DoctorFacts) -> Cause:
    if isinstance(facts.loaded_modules, Unread):
        return not_read("driver", facts.loaded_modules, "is /sys mounted?", code="module-unknown")
    return Cause(
        code="driver-not-loaded",
        severity=Severity.CRITICAL,
        subject="driver",
        message="no nvidia module is loaded",
        remedy="modprobe nvidia; if it fails, see dmesg and gpuguard status",
        source=_VERSION_FILE,
    )


def _as_cause(finding: Finding, source: str) -> Cause:
    return Cause(
        code=finding.code,
        severity=finding.severity,
        subject=finding.subject,
        message=finding.message,
        remedy=finding.remedy,
        evidence=finding.evidence,
        source=source,
    )


def running_kernel(host: HostFacts) -> KernelFacts | None:
    """The kernel that runs, if its module tree is there."""
    return next((kernel for kernel in host.kernels if kernel.release == host.running), None)


def _disk_mismatch(host: HostFacts) -> Iterator[Cause]:
    kernel = running_kernel(host)
    nvidia = next((m for m in kernel.modules if m.name == "nvidia"), None) if kernel else None
    on_disk = nvidia.file.version if nvidia and nvidia.file else None
    if nvidia and nvidia.file and on_disk and host.driver.loaded and on_disk != host.driver.loaded:
        yield Cause(
            code="loaded-not-on-disk",
            severity=Severity.WARNING,
            subject="driver",
            message=f"{host.driver.loaded} is loaded, {on_disk} is on disk for this kernel",
            remedy="gpuguard reload, or reboot; gpuguard status says whether that is safe",
            source=nvidia.file.path,
        )


def _firmware_mismatch(facts: DoctorFacts, loaded: str | None) -> Iterator[Cause]:
    for card in facts.own_cards():
        if card.firmware is not None and loaded is not None and card.firmware != loaded:
            yield Cause(
                code="firmware-mismatch",
                severity=Severity.CRITICAL,
                subject=card.bus_id,
                message=f"GSP firmware {card.firmware}, module {loaded}: they must be the same",
                remedy="install the firmware package of the module's version, then reboot",
                source=f"/proc/driver/nvidia/gpus/{card.bus_id}/information",
            )


def check_flavour(facts: DoctorFacts, assessment: Assessment | None) -> Check:
    """The open flavour is loaded: the proprietary one cannot be patched."""
    flavour = facts.host.driver.flavour if isinstance(facts.host, HostFacts) else None
    if flavour is None:
        return not_applicable("flavour", f"no driver is loaded, or {_VERSION_FILE} is not there")
    findings = assessment.findings if assessment else ()
    causes = [_as_cause(f, _VERSION_FILE) for f in findings if f.code == "proprietary-driver"]
    return conclude("flavour", f"{flavour} kernel modules", causes)


_GRANT_CODES = ("p2p-", "card-missing", "card-unreachable")


def check_grant(facts: DoctorFacts, assessment: Assessment | None) -> Check:
    """What the driver grants: P2P over every ordered pair. A grant is no proof."""
    if not isinstance(facts.host, HostFacts) or assessment is None:
        return not_applicable("grant", "the host could not be looked at")
    p2p = facts.host.p2p
    if p2p.source is None and facts.host.driver.loaded is None:
        return not_applicable("grant", "no driver is loaded")
    found = [f for f in assessment.findings if f.code.startswith(_GRANT_CODES)]
    source = {"nvml": "NVML", "nvidia-smi": "nvidia-smi topo -p2p"}.get(p2p.source or "", "NVML")
    fine = f"{len(p2p.pairs)} of {len(p2p.pairs)} ordered pairs ({source})"
    return conclude("grant", fine, [_as_cause(f, source) for f in found])


def check_options(facts: DoctorFacts) -> Check:
    """The live options are those that are configured, and the other way round."""
    if facts.params is None:
        return not_applicable("options", "no driver is loaded")
    if isinstance(facts.params, Unread):
        return conclude("options", "", [not_read("driver", facts.params, code="options-unknown")])
    if isinstance(facts.options, Unread):
        return conclude("options", "", [not_read("driver", facts.options, code="options-unknown")])
    live = dict(facts.params)
    wanted = {option.name: option for option in facts.options}
    causes = list(_option_causes(live, wanted.values()))
    causes += _forgotten(live, wanted)
    notes = [
        f"{option.name} (in {option.source}) is not listed by the driver: not compared"
        for option in wanted.values()
        if _LIVE_NAME.get(option.name, option.name) not in live
    ]
    notes += [f"live: {name}={live[name]}" for name in _TOLD if live.get(name)]
    return conclude("options", f"{len(wanted)} configured, all live", causes, notes)


#: nv-reg.h: configured under one name, listed under another.
_LIVE_NAME = {"RestrictProfilingToAdminUsers": "RmProfilingAdminOnly"}
_TOLD = ("RegistryDwords", "RegistryDwordsPerDevice", "ExcludedGpus", "GpuBlacklist")
_LISTS = ("RegistryDwords", "RegistryDwordsPerDevice")


def _option_causes(live: dict[str, str], wanted: Iterable[ModuleOption]) -> Iterator[Cause]:
    for option in wanted:
        name = _LIVE_NAME.get(option.name, option.name)
        if name in live and not same_value(name, option.value, live[name]):
            yield Cause(
                code="option-not-live",
                severity=Severity.WARNING,
                subject=f"NVreg_{option.name}",
                message=f"configured is {option.value or '(empty)'}, "
                f"the loaded module runs with {live[name] or '(empty)'}",
                remedy="gpuguard reload, or reboot; if the initramfs carries the modules it also "
                "carries the options: update-initramfs -u first",
                source=option.source,
                evidence={"live": live[name], "configured": option.value, "live_source": _PARAMS},
            )


def _forgotten(live: dict[str, str], wanted: Iterable[str]) -> Iterator[Cause]:
    for name in _LISTS:
        if live.get(name) and name not in wanted:
            yield Cause(
                code="option-not-configured",
                severity=Severity.WARNING,
                subject=f"NVreg_{name}",
                message=f"the loaded module runs with {live[name]}, and no file configures it: "
                "the next boot will be without",
                remedy=f'options nvidia NVreg_{name}="{live[name]}" in /etc/modprobe.d/nvidia.conf',
                source=_PARAMS,
            )


def same_value(name: str, one: str, other: str) -> bool:
    """Numbers compare as the kernel reads them (base by prefix, 32 bits), lists by entry."""
    if name in _LISTS:
        return _entries(one) == _entries(other)
    numbers = [_number(value) for value in (one, other)]
    return numbers[0] == numbers[1] if None not in numbers else one == other


def _entries(text: str) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in text.split(";") if entry.strip())
    return {name.strip().lower(): str(_number(value) or value.strip()) for name, _, value in pairs}


def _number(text: str) -> int | None:
    word = text.strip().lower()
    base = 16 if "0x" in word else 8 if len(word) > 1 and word.startswith("0") else 10
    try:
        return int(word, base) & 0xFFFFFFFF
    except ValueError:
        return None


def check_nodes(facts: DoctorFacts) -> Check:
    """The device nodes that CUDA opens are there, and the UVM module behind one of them."""
    host = facts.host
    if isinstance(host, Unread) or host.driver.loaded is None:
        return not_applicable("nodes", "no driver is loaded")
    missing = facts.missing_nodes
    if isinstance(missing, Unread):
        return conclude("nodes", "", [not_read("/dev", missing, code="nodes-unknown")])
    causes = list(_node_causes(missing, facts))
    return conclude("nodes", "nvidiactl, nvidia-uvm and one node per card", causes)


def _node_causes(missing: tuple[str, ...], facts: DoctorFacts) -> Iterator[Cause]:
    loaded = facts.loaded_modules
    if not isinstance(loaded, Unread) and "nvidia-uvm" not in loaded:
        yield Cause(
            code="uvm-not-loaded",
            severity=Severity.CRITICAL,
            subject="nvidia-uvm",
            message="the module nvidia-uvm is not loaded: CUDA cannot start",
            remedy="modprobe nvidia-uvm",
            source="/sys/module",
        )
    if missing:
        inside = facts.virt.container
        yield Cause(
            code="device-node-missing",
            severity=Severity.CRITICAL,
            subject=", ".join(missing),
            message="programs open these device nodes, and they are not there",
            remedy=f"give them to the container ({inside}): --gpus all, or --device"
            if inside
            else "nvidia-modprobe -u -c 0 makes them; or start nvidia-persistenced",
            source="/dev",
        )
