// Integers of 4 bits in groups, as kernels read them: two rows of 16 a thread in the order of an mma's registers.
//
// Packed by engine/packed4.py: weight [row tiles of 16, steps of 64 columns, 32 lanes, 4 words], the row tiles a multiple of
// 4, the steps of 2; what is there beyond the weight's rows and columns is never stored, or multiplied by 0. Word j of a
// lane has the 8 numbers that mma m16n8k16 takes of columns 16·j to 16·j + 15 of the step: the number at the low (e = 0) or
// high (e = 1) half of register a[i] is at bit 4·i + 16·e.
// scales and zeros [groups, row tiles / 4, 8, 4, 2]: of group, r and tile % 4 those of rows r and r + 8 of the tile.
#pragma once

#include "ptx.cuh"

constexpr int kPackedStep = 64;  // columns of a step

// How numbers q of 0 to 15 are given to the tensor cores without arithmetic on each: as kOffset + q times a power of two,
// kUnit[0] in rows 0 to 7 of a tile and kUnit[1] in rows 8 to 15. The sums are put right with the sum of x.
template <typename T>
struct Nibbles;

template <>
struct Nibbles<bf16> {  // 128 + q, in the last bits of a number whose exponent makes them ones
  static constexpr float kOffset = 128.0f;
  __device__ static constexpr float unit(int) { return 1.0f; }
  static constexpr unsigned kOnes = 0x3f803f80u;
};

template <>
struct Nibbles<fp16> {  // q · 2⁻²⁴ and q · 2⁻²⁰, subnormal numbers, which tensor cores take as they are
  static constexpr float kOffset = 0.0f;
  __device__ static constexpr float unit(int half) { return half == 0 ? 0x1p-24f : 0x1p-20f; }
  static constexpr unsigned kOnes = 0x3c003c00u;
};

// The registers of a for one mma. mask: 0x000f000f, in a register.
__device__ __forceinline__ void unpack_nibbles(unsigned word, unsigned mask, unsigned (&a)[4], bf16) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = (word >> 4 * i & mask) | 0x43004300u;
}
__device__ __forceinline__ void unpack_nibbles(unsigned word, unsigned mask, unsigned (&a)[4], fp16) {
  a[0] = word & 0x000f000fu, a[1] = word & 0x00f000f0u;
  a[2] = word >> 8 & 0x000f000fu, a[3] = word >> 8 & 0x00f000f0u;
}
