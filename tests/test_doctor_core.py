"""The doctor's judgement on facts alone: a healthy host, and one thing wrong at a time."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from gpuguard.cli.doctor import doctor_text
from gpuguard.core.doctor import Diagnosis, diagnose, doctor_document
from gpuguard.core.doctor_check import CheckState
from gpuguard.core.doctor_facts import (
    Bridge,
    CardFacts,
    DoctorFacts,
    Link,
    LogFacts,
    LogFault,
    NvmlCard,
    ServingUnit,
    Setting,
    Unread,
    VirtFacts,
    VllmCache,
)
from gpuguard.core.doctor_serving import needed_level
from gpuguard.core.facts import (
    BuildRecord,
    DriverFacts,
    Gpu,
    HeadersFacts,
    HeadersState,
    HostFacts,
    Identity,
    InitramfsFacts,
    InitramfsState,
    KernelFacts,
    ModuleFile,
    NextKernel,
    P2pFacts,
    P2pPair,
    ResolvedModule,
    SecureBootFacts,
    SecureBootState,
)
from gpuguard.core.policy import Policy
from tests.doctor_kit import FIRST, SECOND, doctor_problems

K1 = "6.8.0-90-generic"
OURS = "ab" * 20
GIB = 1 << 30
FULL = Link(speed=32.0, width=16, max_speed=32.0, max_width=16)


def card(address: str, **more: Any) -> CardFacts:
    return CardFacts(
        **{
            "bus_id": address,
            "driver": "nvidia",
            "root": f"pci{address[:7]}",
            "bridges": (Bridge(address=f"{address[:5]}00:01.0", acs=0, link=FULL),),
            "numa_node": 0,
            "bar1_bytes": 32 * GIB,
            "boot_vga": False,
            "link": FULL,
            "minor": 0,
            "firmware": "580.159.04",
            "nvml": nvml(address),
            **more,
        }
    )


def nvml(address: str = FIRST, **more: Any) -> NvmlCard:
    known = {"memory_bytes": 31 * GIB, "display_active": False, "utilization_percent": 0}
    return NvmlCard(bus_id=address, uuid=f"GPU-{address}", **{**known, **more})


def host_facts(**more: Any) -> HostFacts:
    file = ModuleFile(
        path=f"/lib/modules/{K1}/updates/gpuguard/nvidia.ko", base_name="nvidia",
        build_id=OURS, vermagic=f"{K1} SMP", version="580.159.04",
    )  # fmt: skip
    kernel = KernelFacts(
        release=K1,
        image=f"/boot/vmlinuz-{K1}",
        modules=(ResolvedModule(name="nvidia", file=file, identity=Identity.PATCHED),),
        headers=HeadersFacts(state=HeadersState.PRESENT),
        initramfs=InitramfsFacts(state=InitramfsState.NONE),
        records=(
            BuildRecord(release=K1, driver_version="580.159.04", build_ids=(("nvidia", OURS),)),
        ),
    )
    gpus = tuple(
        Gpu(index=i, uuid=f"GPU-{a}", pci_bus_id=a, name="RTX 5090")
        for i, a in enumerate((FIRST, SECOND))
    )
    pairs = tuple(
        P2pPair(src=a.uuid, dst=b.uuid, read="OK", write="OK") for a, b in permutations(gpus, 2)
    )
    good = HostFacts(
        kernels=(kernel,),
        running=K1,
        next=NextKernel(release=K1, source="grub"),
        driver=DriverFacts(
            userland="580.159.04", loaded="580.159.04", loaded_build_id=OURS, flavour="open"
        ),
        secure_boot=SecureBootFacts(state=SecureBootState.OFF),
        p2p=P2pFacts(source="nvml", gpus=gpus, pairs=pairs),
        pci_gpus=(FIRST, SECOND),
    )
    return replace(good, **more)


def good(**more: Any) -> DoctorFacts:
    facts = DoctorFacts(
        host=host_facts(),
        cards=(card(FIRST), card(SECOND)),
        params=(("RegistryDwords", ""),),
        loaded_modules=("nvidia", "nvidia-uvm"),
        virt=VirtFacts(
            vendor="ASRockRack", product="X", hypervisor=False, cpu_vendor="AuthenticAMD"
        ),
        log=LogFacts(source="journalctl"),
        lockdown="none",
        units=(ServingUnit(name="vllm.service", path="/etc/systemd/system/vllm.service"),),
        booted=1000.0,
    )
    return replace(facts, **more)


def judged(facts: DoctorFacts) -> Diagnosis:
    diagnosis = diagnose(facts, Policy())
    assert doctor_problems(doctor_document(diagnosis)) == []
    assert all(c.source and c.remedy for c in diagnosis.causes), "a cause says where and what to do"
    return diagnosis


def test_a_healthy_host_is_ok() -> None:
    diagnosis = judged(good())
    assert [c.name for c in diagnosis.checks if c.state is not CheckState.OK] == []
    assert (diagnosis.verdict, diagnosis.exit_status) == ("ok", 0)
    assert len(diagnosis.checks) == len({check.name for check in diagnosis.checks}) == 16


def only_bad(facts: DoctorFacts) -> tuple[str, str, str, int]:
    """(check, code, severity, exit status) of the single finding."""
    diagnosis = judged(facts)
    (cause,) = diagnosis.causes
    check = next(c.name for c in diagnosis.checks if c.causes)
    return check, cause.code, cause.severity.value, diagnosis.exit_status


def first(**more: Any) -> tuple[CardFacts, ...]:
    return (card(FIRST, **more), card(SECOND))


def unit(**environment: str) -> tuple[ServingUnit, ...]:
    settings = tuple((name, Setting(value, "/etc/x.env")) for name, value in environment.items())
    return (ServingUnit(name="vllm.service", path="/x", environment=settings),)


UNREAD = Unread("/place", "Permission denied")
BUSY = nvml(utilization_percent=97)
SLOW = Link(speed=8.0, width=16, max_speed=32.0, max_width=16)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"cards": first(driver="nouveau")}, ("cards", "card-foreign-driver", "critical", 1)),
        ({"cards": first(driver=None)}, ("cards", "card-unbound", "critical", 1)),
        ({"cards": first(excluded_by_driver=True)}, ("cards", "card-excluded", "critical", 1)),
        ({"cards": first(firmware="570.1")}, ("module", "firmware-mismatch", "critical", 1)),
        (
            {"cards": first(iommu_group="3", iommu_type="DMA")},
            ("iommu", "iommu-translating", "critical", 1),
        ),
        ({"cards": first(iommu_type=UNREAD)}, ("iommu", "iommu-unknown", "unknown", 3)),
        (
            {"cards": first(bridges=(Bridge(address="0000:00:01.0", acs=0x1D),))},
            ("acs", "acs-redirect", "warning", 1),
        ),
        (
            {"cards": first(bridges=(Bridge(address="0000:00:01.0", acs=UNREAD),))},
            ("acs", "acs-unknown", "unknown", 3),
        ),
        ({"cards": first(bar1_bytes=GIB // 4)}, ("bar1", "bar1-small", "critical", 1)),
        ({"cards": first(bar1_bytes=16 * GIB)}, ("bar1", "bar1-small", "critical", 1)),
        ({"cards": first(bar1_bytes=0)}, ("bar1", "bar1-unassigned", "critical", 1)),
        ({"cards": first(bar1_bytes=UNREAD)}, ("bar1", "bar1-unknown", "unknown", 3)),
        (
            {"cards": first(nvml=nvml(memory_bytes=None)), "nvml_problem": "no answer"},
            ("bar1", "bar1-unknown", "unknown", 3),
        ),
        (
            {"cards": first(nvml=nvml(display_active=True))},
            ("display", "display-card", "warning", 1),
        ),
        ({"cards": first(connected=("card1-DP-1",))}, ("display", "display-card", "warning", 1)),
        ({"cards": first(link=SLOW, nvml=BUSY)}, ("link", "link-speed", "warning", 1)),
        ({"cards": first(link=replace(FULL, width=8))}, ("link", "link-width", "warning", 1)),
        ({"cards": first(link=replace(FULL, width=None))}, ("link", "link-unknown", "unknown", 3)),
        ({"params": UNREAD}, ("options", "options-unknown", "unknown", 3)),
        ({"options": UNREAD}, ("options", "options-unknown", "unknown", 3)),
        (
            {"params": (("RegistryDwords", "a=1"),)},
            ("options", "option-not-configured", "warning", 1),
        ),
        ({"missing_nodes": ("/dev/nvidia0",)}, ("nodes", "device-node-missing", "critical", 1)),
        ({"missing_nodes": UNREAD}, ("nodes", "nodes-unknown", "unknown", 3)),
        ({"loaded_modules": ("nvidia",)}, ("nodes", "uvm-not-loaded", "critical", 1)),
        ({"log": LogFacts(problem="not root")}, ("log", "log-unknown", "unknown", 3)),
        (
            {"virt": VirtFacts(hypervisor=True, cpu_vendor="AuthenticAMD")},
            ("virt", "virtualised", "warning", 1),
        ),
        ({"lockdown": UNREAD}, ("secure-boot", "secure-boot-unknown", "unknown", 3)),
        ({"units": UNREAD}, ("nccl", "nccl-unknown", "unknown", 3)),
        ({"units": unit(NCCL_P2P_DISABLE="1")}, ("nccl", "nccl-p2p-disabled", "warning", 1)),
        ({"units": unit(NCCL_P2P_LEVEL="NVL")}, ("nccl", "nccl-p2p-level", "warning", 1)),
        (
            {"caches": (VllmCache(path="/c", modified=2000.0, cards=2, refused=1),)},
            ("vllm-cache", "vllm-cache-stale", "warning", 1),
        ),
        (
            {"caches": (VllmCache(path="/c", modified=2000.0, cards=2),), "built": 3000.0},
            ("vllm-cache", "vllm-cache-stale", "warning", 1),
        ),
        ({"unread_caches": (UNREAD,)}, ("vllm-cache", "vllm-cache-unknown", "unknown", 3)),
    ],
)
def test_one_thing_wrong(change: dict[str, Any], expected: tuple[str, str, str, int]) -> None:
    assert only_bad(good(**change)) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"cards": first(iommu_group="3", iommu_type="identity")},
        {"cards": first(bridges=(Bridge(address="0000:00:01.0", acs=0x01),))},
        {"cards": first(bridges=(Bridge(address="0000:00:01.0", acs=None),))},
        {"cards": first(link=SLOW)},
        {"cards": first(boot_vga=True)},
        {"cards": first(boot_vga=None)},
        {"cards": first(driver="vfio-pci"), "excluded": frozenset({FIRST})},
        {"units": unit(VLLM_SKIP_P2P_CHECK="0")},
        {"units": ()},
        {"caches": (VllmCache(path="/c", modified=2000.0, cards=2),)},
        {"lockdown": None},
        {"has_module_trees": False},
    ],
)
def test_what_is_no_fault(change: dict[str, Any]) -> None:
    diagnosis = judged(good(**change))
    assert diagnosis.causes == ()
    assert diagnosis.exit_status == 0


def test_a_problem_outranks_the_unknown() -> None:
    diagnosis = judged(good(lockdown=UNREAD, missing_nodes=("/dev/nvidia0",)))
    assert (diagnosis.verdict, diagnosis.exit_status) == ("critical", 1)


def test_nvlink_needs_no_level() -> None:
    intel = VirtFacts(vendor="X", hypervisor=False, cpu_vendor="GenuineIntel")
    linked = tuple(
        card(a, nvml=nvml(a, nvlink_peers=(b,))) for a, b in ((FIRST, SECOND), (SECOND, FIRST))
    )
    assert only_bad(good(virt=intel))[1] == "nccl-p2p-level"
    assert judged(good(virt=intel, cards=linked)).causes == ()
    # two bridged pairs of four: between the pairs it is PCIe all the same
    third = card("0000:81:00.0", nvml=nvml("0000:81:00.0", nvlink_peers=("0000:c1:00.0",)))
    assert needed_level(good(virt=intel, cards=(*linked, third))) == "PHB"


def test_the_escape_hatch_is_right_while_nothing_is_granted() -> None:
    host = host_facts()
    refused = tuple(replace(pair, read="CNS", write="CNS") for pair in host.p2p.pairs)
    facts = good(
        host=replace(host, p2p=replace(host.p2p, pairs=refused)), units=unit(NCCL_P2P_DISABLE="1")
    )
    diagnosis = judged(facts)
    assert [cause.code for cause in diagnosis.causes] == ["p2p-lost"]
    nccl = next(check for check in diagnosis.checks if check.name == "nccl")
    assert "is right as long as" in nccl.notes[0]


def test_a_stock_module_is_named_first() -> None:
    driver = replace(host_facts().driver, loaded_build_id="cd" * 20)
    diagnosis = judged(good(host=host_facts(driver=driver)))
    (cause,) = diagnosis.causes
    assert (cause.code, cause.source) == (
        "loaded-stock", "/sys/module/nvidia/notes/.note.gnu.build-id",
    )  # fmt: skip


def test_a_host_that_cannot_be_looked_at() -> None:
    diagnosis = judged(good(host=Unread("the host's kernels and modules", "no modprobe")))
    assert diagnosis.exit_status == 3
    assert {c.code for c in diagnosis.causes} == {"module-unknown", "secure-boot-unknown"}


def test_the_text_shows_every_check_and_each_cause_with_its_source() -> None:
    fault = LogFault(kind="fallen-off", card=FIRST, text="NVRM: …", time="2026-11-29T07:06:41Z")
    styled = doctor_text(judged(good(log=LogFacts(source="journalctl", faults=(fault,)))))
    text = re.sub(r"\x1b\[[0-9;]*m", "", styled)
    lines = text.splitlines()
    assert lines[0] == "gpuguard doctor: critical"
    assert sum(line.startswith("  ok ") for line in lines) == 15
    assert "  PROBLEM  log          card-fallen-off: 0000:01:00.0" in lines
    assert "     source: journalctl" in lines
    assert any(line.startswith("  -> power it off and on") for line in lines)
