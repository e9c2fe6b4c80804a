/* The border between the core and the kernel interface layer of nvidia.ko. */

#ifndef RM_CORE_H
#define RM_CORE_H

/* As NVML reports it: 0 OK, 1 chipset not supported. */
#define RM_P2P_OK 0u
#define RM_P2P_CHIPSET_NOT_SUPPORTED 1u

/* Made by the core, called by the interface layer. */
const char *rm_version(void);
const char *rm_p2p_policy(void);
unsigned int rm_p2p_status(unsigned int source, unsigned int peer);
int rm_init(void);

/* Made by the interface layer, called by the core. */
void os_log(const char *message);

#endif
