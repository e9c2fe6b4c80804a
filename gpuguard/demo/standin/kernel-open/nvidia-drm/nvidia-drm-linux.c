/* nvidia-drm.ko: needs nvidia-modeset.ko. */

#include "nv-standin.h"

static int __init nv_linux_drm_init(void)
{
	pr_info("nvidia-drm: stand-in, %u heads\n", nvidia_standin_heads());
	return 0;
}

static void __exit nv_linux_drm_exit(void)
{
}

module_init(nv_linux_drm_init);
module_exit(nv_linux_drm_exit);

MODULE_DESCRIPTION("gpuguard stand-in for NVIDIA's DRM driver");
MODULE_VERSION(NV_VERSION_STRING);
MODULE_LICENSE("Dual MIT/GPL");
