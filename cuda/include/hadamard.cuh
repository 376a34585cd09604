// Groups of 32 numbers as int8 with a bfloat16 scale, rotated or not: ref/int8_all_reduce.py, step by step. A group is
// neighbouring lanes with kCount numbers each, in order.
#pragma once

#include "dtype.cuh"
#include "reduce.cuh"

constexpr int kGroup = 32;           // numbers
constexpr int kGroupBytes = 34;      // on the wire
constexpr float kRotation = 0.17677669529663688f;  // 1/√32
constexpr float kSmallest = 0x1p-100f;  // a group below this travels as zeros

// H x, in place; its own inverse. Rounds at distance 1, 2, 4, 8, 16, then one product.
template <int kCount>
__device__ __forceinline__ void rotate(float (&x)[kCount]) {
#pragma unroll
  for (int distance = 1; distance < kCount; distance *= 2)
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (!(i & distance)) {
        const float first = x[i], second = x[i + distance];
        x[i] = first + second, x[i + distance] = first - second;
      }
#pragma unroll
  for (int lanes = 1; lanes < kGroup / kCount; lanes *= 2)
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, x[i], lanes);
      x[i] = threadIdx.x & lanes ? other - x[i] : x[i] + other;
    }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = __fmul_rn(x[i], kRotation);
}

template <int kCount>
struct Codes {  // of a lane's numbers, the first in the lowest byte; the scale of the whole group
  unsigned q[kCount / 4];
  unsigned short scale;
};

template <int kCount>
__device__ __forceinline__ Codes<kCount> quantize(const float (&y)[kCount]) {
  unsigned bits = 0;  // of the largest magnitude; of infinity and NaN they are the largest
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits = max(bits, __float_as_uint(y[i]) & 0x7fffffffu);
#pragma unroll
  for (int lanes = 1; lanes < kGroup / kCount; lanes *= 2) bits = max(bits, __shfl_xor_sync(kAllLanes, bits, lanes));
  const float largest = __uint_as_float(bits);
  if (bits >= 0x7f800000u) return {{}, 0x7fc0};
  if (largest < kSmallest) return {{}, 0};
  const unsigned scale = (__float_as_uint(__fdiv_rn(largest, 127.0f)) + 0xffffu) >> 16;  // rounded up
  const float inverse = __fdiv_rn(1.0f, __uint_as_float(scale << 16));
  Codes<kCount> codes{{}, static_cast<unsigned short>(scale)};
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    codes.q[i / 4] |= (static_cast<unsigned>(__float2int_rn(__fmul_rn(y[i], inverse))) & 255u) << 8 * (i % 4);
  return codes;
}

template <int kCount>
__device__ __forceinline__ void dequantize(const Codes<kCount>& codes, float (&y)[kCount]) {
  const float scale = __uint_as_float(static_cast<unsigned>(codes.scale) << 16);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    y[i] = __fmul_rn(static_cast<float>(static_cast<signed char>(codes.q[i / 4] >> 8 * (i % 4))), scale);
}
