/* Stands for the kernel's own modules in a demo tree; tools look at how those are compressed. */

#include <linux/module.h>

MODULE_INFO(intree, "Y");
MODULE_DESCRIPTION("gpuguard sample of a kernel's own module");
MODULE_LICENSE("Dual MIT/GPL");
