"""The kernels, compiled at run time for the card at hand.

``mix`` is ``core.deep_pattern.mix``. Addresses need no alignment: words are then moved byte
by byte. Loads are volatile where a cached value would be no proof.
"""

from __future__ import annotations

NAMES = ("fill", "spread", "copy", "compare", "peek", "compare_sum", "link_chain", "follow_chain")

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned char u8;

__device__ __forceinline__ u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

__device__ __forceinline__ u64 me() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u64 all() { return (u64)gridDim.x * blockDim.x; }

__device__ __forceinline__ u64 load(const u8 *at) {
    if (((u64)at & 7) == 0) return *(const volatile u64 *)at;
    u64 word = 0;
    for (int i = 0; i < 8; i++) word |= (u64)((const volatile u8 *)at)[i] << (8 * i);
    return word;
}

__device__ __forceinline__ void store(u8 *at, u64 word) {
    if (((u64)at & 7) == 0) { *(volatile u64 *)at = word; return; }
    for (int i = 0; i < 8; i++) ((volatile u8 *)at)[i] = (u8)(word >> (8 * i));
}

extern "C" __global__ void fill(u8 *at, u64 words, u64 seed) {
    for (u64 i = me(); i < words; i += all()) store(at + 8 * i, mix(seed + i));
}

extern "C" __global__ void spread(u8 *at, u64 words, u64 word) {
    for (u64 i = me(); i < words; i += all()) store(at + 8 * i, word);
}

extern "C" __global__ void copy(u8 *dst, const u8 *src, u64 bytes) {
    u64 quads = (((u64)dst | (u64)src) & 15) == 0 ? bytes / 16 : 0;
    uint4 *to = (uint4 *)dst;
    const uint4 *from = (const uint4 *)src;
    u64 i = me();
    for (; i + 3 * all() < quads; i += 4 * all()) {  // four loads on their way at once
        uint4 a = from[i], b = from[i + all()], c = from[i + 2 * all()], d = from[i + 3 * all()];
        to[i] = a; to[i + all()] = b; to[i + 2 * all()] = c; to[i + 3 * all()] = d;
    }
    for (; i < quads; i += all()) to[i] = from[i];
    for (u64 k = 16 * quads + me(); k < bytes; k += all()) dst[k] = src[k];
}

// answer: [0] wrong words, [1] index of the first; the host sets them to 0 and all ones.
__device__ __forceinline__ void report(u64 wrong, u64 first, u64 *answer) {
    if (wrong) { atomicAdd(answer, wrong); atomicMin(answer + 1, first); }
}

extern "C" __global__ void compare(const u8 *at, u64 words, u64 seed, u64 *answer) {
    u64 wrong = 0, first = ~0ULL;
    for (u64 i = me(); i < words; i += all())
        if (load(at + 8 * i) != mix(seed + i)) { wrong++; if (i < first) first = i; }
    report(wrong, first, answer);
}

extern "C" __global__ void peek(const u8 *at, u64 index, u64 *answer) {
    answer[2] = load(at + 8 * index);
}

// What an all-reduce of `ranks` buffers must give: their sum, modulo 2^64.
extern "C" __global__ void compare_sum(
    const u8 *at, u64 words, u64 seed, u64 step, u64 ranks, u64 *answer) {
    u64 wrong = 0, first = ~0ULL;
    for (u64 i = me(); i < words; i += all()) {
        u64 sum = 0;
        for (u64 r = 0; r < ranks; r++) sum += mix(seed + r * step + i);
        if (load(at + 8 * i) != sum) { wrong++; if (i < first) first = i; }
    }
    report(wrong, first, answer);
}

extern "C" __global__ void link_chain(u8 *at, u64 nodes, u64 stride) {
    for (u64 i = me(); i < nodes; i += all()) store(at + i * stride, (i + 1) % nodes);
}

extern "C" __global__ void follow_chain(const u8 *at, u64 stride, u64 steps, u64 *answer) {
    u64 node = 0;
    for (u64 i = 0; i < steps; i++) node = *(const volatile u64 *)(at + node * stride);
    answer[0] = node;
}
"""
