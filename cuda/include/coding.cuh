// Numbers in 8 bits with a scale beside them: int8 within ±127, and e4m3. Defined by ref/quant/int8.py and ref/quant/fp8.py.
#pragma once

#include "dtype.cuh"

constexpr int kGroup = 128;  // neighbours that have a scale of their own, where there are groups

template <typename F>
struct Coded;
template <>
struct Coded<signed char> {
  using Bits = signed char;
  using Sum = int;
  static constexpr float kMax = 127.0f;
};
template <>
struct Coded<e4m3> {
  using Bits = unsigned char;
  using Sum = float;
  static constexpr float kMax = 448.0f;
};

// |x| as bits, in the order of the numbers; infinity is above them and NaN above that.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

constexpr float kSmallestNormal = 0x1p-126f;  // what is below it is 0, on a CPU too: its inverse overflows

// The scale of numbers of which the largest has this magnitude. int8 has no code for infinity: its scale is NaN then.
template <typename F>
__device__ __forceinline__ float scale_of(unsigned largest) {
  if (Coded<F>::kMax == 127.0f && largest >= 0x7f800000u) return __uint_as_float(0x7fffffffu);
  const float scale = __uint_as_float(largest) / Coded<F>::kMax;
  return scale < kSmallestNormal ? 0.0f : scale;
}

// x / scale, rounded to the nearest as a division does it; inverse: 1 / scale.
__device__ __forceinline__ float quotient(float x, float scale, float inverse) {
  const float near = x * inverse, better = fmaf(fmaf(-near, scale, x), inverse, near);
  return better == better && near != 0.0f ? better : near;  // of infinity; of −0, which keeps its sign
}

// Codes of four numbers, that of the first in the lowest byte: x / scale to the nearest, ties to even, saturating; 0
// where the scale is too small, or with int8 NaN.
__device__ __forceinline__ unsigned code4(const float* x, float scale, signed char) {
  const float inverse = 1.0f / scale;
  unsigned codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float steps = quotient(x[i], scale, inverse);
    const int code = scale >= kSmallestNormal && steps == steps ? __float2int_rn(fminf(fmaxf(steps, -127.0f), 127.0f)) : 0;
    codes |= (static_cast<unsigned>(code) & 255u) << 8 * i;
  }
  return codes;
}
__device__ __forceinline__ unsigned code4(const float* x, float scale, e4m3) {
  if (scale < kSmallestNormal) return 0;
  const float inverse = 1.0f / scale;
  float steps[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) steps[i] = quotient(x[i], scale, inverse);
  return pack_e4m3(steps[0], steps[1]) | static_cast<unsigned>(pack_e4m3(steps[2], steps[3])) << 16;
}
