// Number formats of storage. Arithmetic is float32: a kernel reads with to_float and writes with from_float<T>.
#pragma once

#if !defined(__CUDACC__)
#include "../host/cuda_host.h"
#endif

using index_t = long long;  // offsets in elements: products of sizes pass 2^31 in a cache or a table of embeddings

struct alignas(2) bf16 {  // bfloat16: the upper half of a float32
  unsigned short bits;
};
struct alignas(2) fp16 {  // IEEE binary16
  unsigned short bits;
};
struct e4m3 {  // fp8 with 4 bits of exponent and 3 of mantissa; no infinity, largest 448
  unsigned char bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

#if defined(__CUDACC__)

__device__ __forceinline__ float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Two numbers at once, each rounded to nearest, ties to even; `low` is the one at the lower address.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ unsigned pack_fp16(float low, float high) {
  unsigned y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ __forceinline__ float to_float(e4m3 x) {  // as a number of fp16 it is 2⁻⁸ of what it is
  const float y = to_float(fp16{static_cast<unsigned short>((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)}) * 256.0f;
  return (x.bits & 0x7f) == 0x7f ? __uint_as_float(0x7fffffffu) : y;
}

#else

__device__ __forceinline__ float to_float(e4m3 x) { return host::e4m3_to_float(x.bits); }
__device__ __forceinline__ float to_float(fp16 x) { return host::fp16_to_float(x.bits); }
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  return host::float_to_bf16(low) | static_cast<unsigned>(host::float_to_bf16(high)) << 16;
}
__device__ __forceinline__ unsigned pack_fp16(float low, float high) {
  return host::float_to_fp16(low) | static_cast<unsigned>(host::float_to_fp16(high)) << 16;
}

#endif

// Two codes of e4m3, each of the nearest number, ties to the even code; beyond ±448 the code of that, of NaN 0x7f. `low` is
// the one at the lower address.
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 890
__device__ __forceinline__ unsigned short pack_e4m3(float low, float high) {
  unsigned short y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
#else
__device__ __forceinline__ unsigned encode_e4m3(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;  // 448 and more
  if (magnitude < 0x3c800000u)                        // 2⁻⁶: below it steps are of 2⁻⁹, which are the last bit of 2¹⁴
    return sign | (__float_as_uint(__uint_as_float(magnitude) + 16384.0f) & 15u);
  return sign | (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
}
__device__ __forceinline__ unsigned short pack_e4m3(float low, float high) {
  return static_cast<unsigned short>(encode_e4m3(low) | encode_e4m3(high) << 8);
}
#endif

__device__ __forceinline__ void round_to(float x, float& y) { y = x; }
__device__ __forceinline__ void round_to(float x, e4m3& y) { y.bits = static_cast<unsigned char>(pack_e4m3(x, 0.0f)); }
__device__ __forceinline__ void round_to(float x, bf16& y) {
  y.bits = static_cast<unsigned short>(pack_bf16(x, 0.0f));
}
__device__ __forceinline__ void round_to(float x, fp16& y) {
  y.bits = static_cast<unsigned short>(pack_fp16(x, 0.0f));
}

// x in the storage type, rounded to nearest, ties to even.
template <typename T>
__device__ __forceinline__ T from_float(float x) {
  T y;
  round_to(x, y);
  return y;
}
