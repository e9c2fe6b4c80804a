# What the makefiles of both core objects share.

CC        ?= gcc
LD        ?= ld
MKDIR     ?= mkdir -p

TARGET_OS   ?= $(shell uname)
TARGET_ARCH ?= $(shell uname -m)
OUTPUTDIR   ?= _out/$(TARGET_OS)_$(TARGET_ARCH)

# The core becomes part of a kernel module, so it obeys the kernel's rules: no libc, no floating
# point, no red zone (an interrupt would overwrite it), addresses in the top 2 GB.
CORE_CFLAGS := -std=gnu11 -O2 -Wall -Wextra -Wundef -Wstrict-prototypes
CORE_CFLAGS += -ffreestanding -fno-common -fno-pic -fno-stack-protector
CORE_CFLAGS += -fno-strict-aliasing -fno-asynchronous-unwind-tables

# Expands to a flag if the compiler knows it.
test_cc_arg = $(shell $(CC) -Werror $(1) -c -x c /dev/null -o /dev/null 2>/dev/null && echo '$(1)')

ifeq ($(TARGET_ARCH),x86_64)
  CORE_CFLAGS += -mno-red-zone -mcmodel=kernel -msoft-float -mno-mmx -mno-sse -mno-sse2
  # objtool looks at the linked module where the kernel is built with IBT.
  CORE_CFLAGS += $(call test_cc_arg,-fcf-protection=branch)
  CORE_CFLAGS += $(call test_cc_arg,-mindirect-branch=thunk-extern)
  CORE_CFLAGS += $(call test_cc_arg,-mfunction-return=thunk-extern)
endif
ifeq ($(TARGET_ARCH),aarch64)
  CORE_CFLAGS += -mgeneral-regs-only -mstrict-align
  CORE_CFLAGS += $(call test_cc_arg,-mno-outline-atomics)
endif
