"""Names of kernel and driver packages on Debian and Ubuntu, as shell patterns.

Both naming schemes of NVIDIA's packages: with the branch in the name (``nvidia-dkms-580-open``)
and, from branch 590 on, without (``nvidia-dkms-open``).
"""

from __future__ import annotations

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
    "linux-oracle*",
    "linux-kvm*",
    "linux-realtime*",
    # the driver: modules, userland, firmware; all of it has to be of one version
    "nvidia-*",
    "libnvidia-*",
    "libcuda1",
    "libnvcuvid1",
    "libnvoptix1",
    "libegl-nvidia*",
    "libgl1-nvidia*",
    "libgles-nvidia*",
    "libglx-nvidia*",
    "xserver-xorg-video-nvidia*",
    "cuda-drivers*",
    "firmware-nvidia-*",
    "linux-firmware",
)

#: NVIDIA's packages that do not belong to the driver and have releases of their own.
NEVER_HELD_PACKAGES = ("nvidia-container-*", "libnvidia-container*", "nvidia-docker*")
