/* nvidia-uvm.ko: needs nvidia.ko. */

#include "nv-standin.h"

static int __init uvm_init_main(void)
{
	pr_info("nvidia-uvm: stand-in, status of the first pair: %u\n",
		nvidia_standin_p2p_status(0, 1));
	return 0;
}

static void __exit uvm_exit_main(void)
{
}

module_init(uvm_init_main);
module_exit(uvm_exit_main);

MODULE_DESCRIPTION("gpuguard stand-in for NVIDIA's unified memory");
MODULE_VERSION(NV_VERSION_STRING);
MODULE_LICENSE("Dual MIT/GPL");
