/* What the five modules know of each other and of the core objects linked into two of them. */

#ifndef NV_STANDIN_H
#define NV_STANDIN_H

#include <linux/module.h>

/* nvidia.ko: the core object, nv-kernel.o */
const char *rm_version(void);
const char *rm_p2p_policy(void);
unsigned int rm_p2p_status(unsigned int source, unsigned int peer);
int rm_init(void);
void os_log(const char *message);

/* nvidia.ko: nv-pci.c */
unsigned int nv_pci_count_cards(void);

/* nvidia-modeset.ko: the core object, nv-modeset-kernel.o */
const char *kms_version(void);
unsigned int kms_heads(void);

/* exported by nvidia.ko */
unsigned int nvidia_standin_p2p_status(unsigned int source, unsigned int peer);

/* exported by nvidia-modeset.ko */
unsigned int nvidia_standin_heads(void);

#endif
