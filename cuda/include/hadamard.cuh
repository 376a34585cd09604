// Groups of 32 numbers as int8 with a bfloat16 scale, rotated or not: ref/int8_all_reduce.py, step by step. A group is
// four neighbouring lanes with eight numbers each, in order.
#pragma once

#include "dtype.cuh"
#include "reduce.cuh"

constexpr int kGroup = 32;           // numbers
constexpr int kGroupBytes = 34;      // on the wire
constexpr float kRotation = 0.17677669529663688f;  // 1/√32
constexpr float kSmallest = 0x1p-100f;  // a group below this travels as zeros

// H x, in place; its own inverse. Rounds at distance 1, 2, 4, 8, 16, then one product.
__device__ __forceinline__ void rotate(float (&x)[8]) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (!(i & distance)) {
        const float first = x[i], second = x[i + distance];
        x[i] = first + second, x[i + distance] = first - second;
      }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, x[i], lanes);
      x[i] = threadIdx.x & lanes ? other - x[i] : x[i] + other;
    }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], kRotation);
}

struct Codes {  // of a lane's eight numbers, the first in the lowest byte; the scale of the whole group
  uint2 q;
  unsigned short scale;
};

__device__ __forceinline__ Codes quantize(const float (&y)[8]) {
  unsigned bits = 0;  // of the largest magnitude; of infinity and NaN they are the largest
#pragma unroll
  for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(y[i]) & 0x7fffffffu);
  bits = max(bits, __shfl_xor_sync(kAllLanes, bits, 1));
  bits = max(bits, __shfl_xor_sync(kAllLanes, bits, 2));
  const float largest = __uint_as_float(bits);
  if (bits >= 0x7f800000u) return {{0, 0}, 0x7fc0};
  if (largest < kSmallest) return {{0, 0}, 0};
  const unsigned scale = (__float_as_uint(__fdiv_rn(largest, 127.0f)) + 0xffffu) >> 16;  // rounded up
  const float inverse = __fdiv_rn(1.0f, __uint_as_float(scale << 16));
  unsigned q[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) q[i] = static_cast<unsigned>(__float2int_rn(__fmul_rn(y[i], inverse))) & 255u;
  return {{q[0] | q[1] << 8 | q[2] << 16 | q[3] << 24, q[4] | q[5] << 8 | q[6] << 16 | q[7] << 24},
          static_cast<unsigned short>(scale)};
}

__device__ __forceinline__ void dequantize(const Codes& codes, float (&y)[8]) {
  const float scale = __uint_as_float(static_cast<unsigned>(codes.scale) << 16);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned word = i < 4 ? codes.q.x : codes.q.y;
    y[i] = __fmul_rn(static_cast<float>(static_cast<signed char>(word >> 8 * (i % 4))), scale);
  }
}
