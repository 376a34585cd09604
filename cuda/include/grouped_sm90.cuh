// Integers of 4 bits in groups as numbers of T for tensor cores, exactly: what grouped.cuh does in fewer steps, but with the
// zero taken off, so that sums need no putting right. For sm_90a, see ptx_sm90.cuh.
#pragma once

#include "grouped.cuh"

__device__ __forceinline__ unsigned both(unsigned bits) { return bits | bits << 16; }

// What takes the bits of q out of a word. By way of a shuffle: constants are loaded anew wherever they are used.
struct Masks {
  unsigned low, high;
};

// The eight numbers q − zero of a row pair in the order of an mma's a, exactly.
__device__ __forceinline__ void integers(unsigned word, unsigned zeros, const Masks& masks, unsigned (&a)[4], fp16) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned zero = zeros >> 8 * (i % 2) & 255u, bits = word >> i / 2 * 8;
    if (i % 2 == 0)
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(a[i]) : "r"((bits & masks.low) | 0x64006400u), "r"(both(0xe400u + zero)));
    else  // 1024 + 16 · q
      asm("fma.rn.f16x2 %0, %1, %2, %3;"
          : "=r"(a[i])
          : "r"((bits & masks.high) | 0x64006400u), "r"(0x2c002c00u), "r"(both(0xd400u + (zero << 4))));
  }
}
__device__ __forceinline__ void integers(unsigned word, unsigned zeros, const Masks& masks, unsigned (&a)[4], bf16) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm("add.rn.bf16x2 %0, %1, %2;"
        : "=r"(a[i])
        : "r"((word >> 4 * i & masks.low) | 0x43004300u), "r"(both(0xc300u + (zeros >> 8 * (i % 2) & 255u))));
}
