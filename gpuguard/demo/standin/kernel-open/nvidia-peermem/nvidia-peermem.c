/* nvidia-peermem.ko: needs nvidia.ko. */

#include "nv-standin.h"

static int __init nv_mem_client_init(void)
{
	pr_info("nvidia-peermem: stand-in, status of the first pair: %u\n",
		nvidia_standin_p2p_status(0, 1));
	return 0;
}

static void __exit nv_mem_client_cleanup(void)
{
}

module_init(nv_mem_client_init);
module_exit(nv_mem_client_cleanup);

MODULE_DESCRIPTION("gpuguard stand-in for NVIDIA's peer memory client");
MODULE_VERSION(NV_VERSION_STRING);
MODULE_LICENSE("Dual MIT/GPL");
