/* The border between the core and the kernel interface layer of nvidia-modeset.ko. */

#ifndef KMS_CORE_H
#define KMS_CORE_H

const char *kms_version(void);
unsigned int kms_heads(void);

#endif
