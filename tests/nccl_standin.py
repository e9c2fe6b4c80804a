"""A library in NCCL's place, for cards whose memory is the CPU's: sums that are right, or faults.

It lies where NVIDIA's wheel puts it, and says how it connects cards as NCCL does. As in a unit that
may talk to loopback alone, its ranks can meet there and nowhere else. Faults are compiled in:
``wrong`` sums with P2P on, ``hang`` with P2P on, ``shm`` (it never takes P2P).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define MOST 16
static struct { const uint64_t *send; uint64_t *receive; size_t count; } queue[MOST];
static int queued;
static int is_off(void) {
    const char *value = getenv("NCCL_P2P_DISABLE");
    return value != NULL && strcmp(value, "1") == 0;
}
const char *ncclGetErrorString(int status) { (void)status; return "unhandled error"; }
int ncclGetVersion(int *version) { *version = 22899; return 0; }
int ncclCommInitAll(void **handles, int size, const int *devices) {
    const char *debug = getenv("NCCL_DEBUG");
    const char *via = is_off() || FAULT == 3 ? "SHM/direct/direct" : "P2P/direct pointer";
    const char *interface = getenv("NCCL_SOCKET_IFNAME");
    if (interface == NULL || strcmp(interface, "lo") != 0) return 2; /* nothing else is allowed */
    if (FAULT == 2 && !is_off()) while (1) sleep(60);
    for (int rank = 0; rank < size; rank++) {
        handles[rank] = malloc(1);
        if (debug != NULL && strcmp(debug, "INFO") == 0)
            printf("host:1:2 [%d] NCCL INFO Channel 00/0 : %d[%d] -> %d[%d] via %s\n", rank,
                   rank, devices[rank], (rank + 1) % size, devices[(rank + 1) % size], via);
    }
    fflush(stdout);
    return 0;
}
int ncclGroupStart(void) { queued = 0; return 0; }
int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, void *handle,
                  void *stream) {
    (void)handle; (void)stream;
    if (type != 5 || op != 0 || queued == MOST) return 4;
    queue[queued].send = send;
    queue[queued].receive = receive;
    queue[queued++].count = count;
    return 0;
}
int ncclGroupEnd(void) {
    for (size_t word = 0; word < queue[0].count; word++) {
        uint64_t sum = FAULT == 1 && !is_off() && word == 100;
        for (int rank = 0; rank < queued; rank++) sum += queue[rank].send[word];
        for (int rank = 0; rank < queued; rank++) queue[rank].receive[word] = sum;
    }
    return 0;
}
"""
FAULTS = {"": 0, "wrong": 1, "hang": 2, "shm": 3}


def build(folder: Path, fault: str = "") -> None:
    """Compile it below a folder that will be on Python's path; needs gcc."""
    place = folder / "nvidia/nccl/lib"
    place.mkdir(parents=True, exist_ok=True)
    source = place / "standin.c"
    source.write_text(_SOURCE)
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", "-w", f"-DFAULT={FAULTS[fault]}",
         "-o", place / "libnccl.so.2", source], check=True,
    )  # fmt: skip
