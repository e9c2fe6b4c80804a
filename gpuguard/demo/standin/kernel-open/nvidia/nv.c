/* nvidia.ko: the kernel's side of the core object. */

#include "nv-standin.h"

void os_log(const char *message)
{
	pr_info("nvidia: stand-in, drives no hardware: %s\n", message);
}

unsigned int nvidia_standin_p2p_status(unsigned int source, unsigned int peer)
{
	return rm_p2p_status(source, peer);
}
EXPORT_SYMBOL(nvidia_standin_p2p_status);

static int __init nvidia_init_module(void)
{
	pr_info("nvidia: version %s, %u cards on the bus\n", rm_version(), nv_pci_count_cards());
	return rm_init();
}

static void __exit nvidia_exit_module(void)
{
}

module_init(nvidia_init_module);
module_exit(nvidia_exit_module);

MODULE_DESCRIPTION("gpuguard stand-in for the NVIDIA driver");
MODULE_VERSION(NV_VERSION_STRING);
MODULE_LICENSE("Dual MIT/GPL");
