/* nvidia.ko: the kernel's side of the core object. */

#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#include "nv-standin.h"

/* What the core object that is in memory says, for the simulated driver library. */
static char *standin_p2p_policy = "";
module_param(standin_p2p_policy, charp, 0444);

static struct proc_dir_entry *nv_proc_dir;

void os_log(const char *message)
{
	pr_info("nvidia: stand-in, drives no hardware: %s\n", message);
}

unsigned int nvidia_standin_p2p_status(unsigned int source, unsigned int peer)
{
	return rm_p2p_status(source, peer);
}
EXPORT_SYMBOL(nvidia_standin_p2p_status);

static int nv_proc_version(struct seq_file *file, void *unused)
{
	seq_printf(file, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  %s  Release Build\n",
		   rm_version());
	return 0;
}

static int __init nvidia_init_module(void)
{
	pr_info("nvidia: version %s, %u cards on the bus\n", rm_version(), nv_pci_count_cards());
	standin_p2p_policy = (char *)rm_p2p_policy();
	nv_proc_dir = proc_mkdir("driver/nvidia", NULL);
	if (nv_proc_dir)
		proc_create_single("version", 0444, nv_proc_dir, nv_proc_version);
	return rm_init();
}

static void __exit nvidia_exit_module(void)
{
	proc_remove(nv_proc_dir);
}

module_init(nvidia_init_module);
module_exit(nvidia_exit_module);

MODULE_DESCRIPTION("gpuguard stand-in for the NVIDIA driver");
MODULE_VERSION(NV_VERSION_STRING);
MODULE_LICENSE("Dual MIT/GPL");
