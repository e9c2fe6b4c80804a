#include "rm_core.h"

/*
 * Whether two cards may reach each other's memory over PCIe. What ships says no for every
 * consumer card; the patch says yes. The text is for tools that look at the file.
 */
static const char policy[] = "standin-p2p-policy=chipset-not-supported";
static const unsigned int status = RM_P2P_CHIPSET_NOT_SUPPORTED;

const char *rm_p2p_policy(void)
{
	return policy;
}

unsigned int rm_p2p_status(unsigned int source, unsigned int peer)
{
	return source == peer ? RM_P2P_OK : status;
}
