#include "kms_core.h"

static const char version[] = NVIDIA_VERSION;

const char *kms_version(void)
{
	return version;
}

unsigned int kms_heads(void)
{
	return 4;
}
