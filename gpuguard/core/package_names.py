"""Names of kernel and driver packages on Debian and Ubuntu, as shell patterns.

Both naming schemes of NVIDIA's packages: with the branch in the name (``nvidia-dkms-580-open``)
and, from branch 590 on, without (``nvidia-dkms-open``). A pattern must never need the branch.
"""

from __future__ import annotations

import re

#: What a maintenance window changes and nothing else should: ``holds.packages``.
HELD_PACKAGES = (
    # kernels: metas, images, modules (also Ubuntu's linux-modules-nvidia-*), headers
    "linux-image-*",
    "linux-modules-*",
    "linux-headers-*",
    "linux-kbuild-*",
    "linux-generic*",
    "linux-lowlatency*",
    "linux-virtual*",
    "linux-oem-*",
    "linux-nvidia*",
    "linux-aws*",
    "linux-azure*",
    "linux-gcp*",
    "linux-gke*",
    "linux-ibm*",
    "linux-oracle*",
    "linux-kvm*",
    "linux-realtime*",
    "proxmox-kernel-*",
    "proxmox-headers-*",
    "proxmox-default-kernel",
    "proxmox-default-headers",
    "pve-kernel-*",
    "pve-headers*",
    # the driver: modules, userland, firmware; all of it has to be of one version
    "nvidia-*",
    "libnvidia-*",
    "libcuda1",
    "libcudadebugger1",
    "libnvcuvid1",
    "libnvoptix1",
    "libegl-nvidia*",
    "libgl1-nvidia*",
    "libgles-nvidia*",
    "libglx-nvidia*",
    "libxnvctrl0",
    "xserver-xorg-video-nvidia*",
    "cuda-drivers*",
    "firmware-nvidia-*",
    "linux-firmware",
    "linux-firmware-nvidia*",
)

#: NVIDIA's packages that do not belong to the driver and have releases of their own.
NEVER_HELD_PACKAGES = (
    "nvidia-container-*",
    "libnvidia-container*",
    "nvidia-docker*",
    "nvidia-cuda-dev",
    "nvidia-cuda-gdb",
    "nvidia-cuda-toolkit*",
    "nvidia-cudnn*",
    "nvidia-nsight*",
)

# linux-image-6.1.0-50-amd64, linux-image-6.12.48+deb13-amd64, linux-headers-6.8.0-90-generic,
# proxmox-kernel-6.8.12-4-pve-signed; three numbers: linux-generic-hwe-24.04 is a meta
_VERSIONED = re.compile(
    r"^((?:linux|proxmox|pve)-[a-z0-9-]*?)-\d+\.\d+\.\d+[a-z0-9.+~]*(?:-\d+)?(?:-(.+))?$"
)
# nvidia-dkms-580-open, libnvidia-compute-580: what the name was before branch 590
_BRANCH = re.compile(
    r"^((?:lib|xserver-xorg-video-)?nvidia(?:-[a-z0-9-]*?)?)-\d{3}(-[a-z][a-z0-9-]*)?$"
)


def kernel_kind(name: str) -> tuple[str, str] | None:
    """``("linux-image", "amd64")`` for one ABI's package; None for metas and all else."""
    match = _VERSIONED.match(name)
    return (match[1], match[2] or "") if match else None


def without_branch(name: str) -> str | None:
    """The name that a package with a driver branch in its name has from branch 590 on."""
    match = _BRANCH.match(name)
    return match[1] + (match[2] or "") if match else None
