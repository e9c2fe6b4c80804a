/* nvidia-modeset.ko: the kernel's side of its core object; needs nvidia.ko. */

#include "nv-standin.h"

unsigned int nvidia_standin_heads(void)
{
	return kms_heads();
}
EXPORT_SYMBOL(nvidia_standin_heads);

static int __init nvkms_init(void)
{
	pr_info("nvidia-modeset: stand-in, version %s, status of a card to itself: %u\n",
		kms_version(), nvidia_standin_p2p_status(0, 0));
	return 0;
}

static void __exit nvkms_exit(void)
{
}

module_init(nvkms_init);
module_exit(nvkms_exit);

MODULE_DESCRIPTION("gpuguard stand-in for NVIDIA's display engine");
MODULE_VERSION(NV_VERSION_STRING);
MODULE_LICENSE("Dual MIT/GPL");
