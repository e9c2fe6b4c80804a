#include "rm_core.h"

static const char version[] = NVIDIA_VERSION;

const char *rm_version(void)
{
	return version;
}

int rm_init(void)
{
	os_log(rm_p2p_policy());
	return 0;
}
