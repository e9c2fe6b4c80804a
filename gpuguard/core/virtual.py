"""Is this machine a guest: there a hypervisor can assert P2P without a path for it."""

from __future__ import annotations

from gpuguard.core.doctor_facts import VirtFacts

_EMULATORS = ("qemu", "standard pc", "kvm", "vmware", "virtualbox", "innotek", "xen", "bochs",
              "parallels", "openstack", "virtual machine")  # fmt: skip


def guest_of(virt: VirtFacts) -> str | None:
    """The virtual machine's name as DMI has it; None on bare metal, or if nothing tells."""
    machine = " ".join(filter(None, (virt.vendor, virt.product)))
    emulated = any(word in machine.lower() for word in _EMULATORS)
    return (machine or "unnamed") if virt.hypervisor or emulated else None
