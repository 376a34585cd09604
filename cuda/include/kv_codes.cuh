// Codes of 8 bits that a KV cache may hold in place of numbers: e4m3, or int8 as signed char. ref.quant.kv.
// A head of a token is written once, as codes and a scale of its own; who reads it multiplies what the codes stand for
// by tensor cores, and the sums or weights of the token by the scale.
#pragma once

#include "reduce.cuh"
#include "vec.cuh"

template <typename C>
constexpr bool kIsCode = sizeof(C) == 1;

template <typename C>
struct StoredAs {
  using type = C;
};
template <>
struct StoredAs<e4m3> {
  using type = unsigned char;
};
template <typename C>
using Stored = typename StoredAs<C>::type;  // as arrays have it

// decode_codes: of a word of codes b0, b1, b2, b3 the numbers of b0 and b2 (even) and of b1 and b3 (odd) as pairs of T,
// divided by kCodeUnit: a power of two that lets fp16 hold a number times a weight of up to 1.
template <typename T, typename C>
constexpr float kCodeUnit = 1.0f;
template <>
constexpr float kCodeUnit<fp16, e4m3> = 256.0f;
template <>
constexpr float kCodeUnit<fp16, signed char> = 64.0f;

// A sign, and exponent and fraction where fp16 has them: 8 less of an exponent, also for subnormals. The code of NaN is
// read as 480; its scale is NaN or infinite (see usable_scale).
__device__ __forceinline__ void decode_codes(unsigned codes, unsigned& even, unsigned& odd, e4m3, fp16) {
  even = (codes << 7 & 0x3f803f80u) | (codes << 8 & 0x80008000u);
  odd = (codes >> 1 & 0x3f803f80u) | (codes & 0x80008000u);
}
__device__ __forceinline__ void decode_codes(unsigned codes, unsigned& even, unsigned& odd, e4m3, bf16) {
  constexpr unsigned kTwoTo120 = 0x7b807b80u, kMinusZero = 0x80008000u;
  even = fma2((codes << 4 & 0x07f007f0u) | (codes << 8 & 0x80008000u), kTwoTo120, kMinusZero, bf16{});
  odd = fma2((codes >> 4 & 0x07f007f0u) | (codes & 0x80008000u), kTwoTo120, kMinusZero, bf16{});
}
// 1024 + 128 + q by its bits; divided by 64, and 18 less.
__device__ __forceinline__ void decode_codes(unsigned codes, unsigned& even, unsigned& odd, signed char, fp16) {
  even = fma2((codes & 0x00ff00ffu) ^ 0x64806480u, 0x24002400u, 0xcc80cc80u, fp16{});
  odd = fma2((codes >> 8 & 0x00ff00ffu) ^ 0x64806480u, 0x24002400u, 0xcc80cc80u, fp16{});
}
// 128 + (the lower seven bits), less 128, or less 256 if the upper bit is set.
__device__ __forceinline__ void decode_codes(unsigned codes, unsigned& even, unsigned& odd, signed char, bf16) {
  constexpr unsigned kOne = 0x3f803f80u;
  const unsigned upper = codes >> 8;
  even = fma2((codes & 0x007f007fu) | 0x43004300u, kOne, (codes & 0x00800080u) | 0xc300c300u, bf16{});
  odd = fma2((upper & 0x007f007fu) | 0x43004300u, kOne, (upper & 0x00800080u) | 0xc300c300u, bf16{});
}

// The same as fp16, divided by kQuickUnit, the quickest way that the GPU has; decode_in_order: of b0 and b1, b2 and b3.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <typename C>
constexpr float kQuickUnit = kCodeUnit<fp16, C>;
template <>
constexpr float kQuickUnit<e4m3> = 1.0f;
__device__ __forceinline__ void decode_quickly(unsigned codes, unsigned& even, unsigned& odd, e4m3) {
  halves_of_e4m3(__byte_perm(codes, 0u, 0x3120), even, odd);
}
__device__ __forceinline__ void decode_in_order(unsigned codes, unsigned& first, unsigned& last, e4m3) {
  halves_of_e4m3(codes, first, last);
}
#else
template <typename C>
constexpr float kQuickUnit = kCodeUnit<fp16, C>;
__device__ __forceinline__ void decode_quickly(unsigned codes, unsigned& even, unsigned& odd, e4m3) {
  decode_codes(codes, even, odd, e4m3{}, fp16{});
}
__device__ __forceinline__ void decode_in_order(unsigned codes, unsigned& first, unsigned& last, e4m3) {
  decode_quickly(__byte_perm(codes, 0u, 0x3120), first, last, e4m3{});
}
#endif
__device__ __forceinline__ void decode_quickly(unsigned codes, unsigned& even, unsigned& odd, signed char) {
  decode_codes(codes, even, odd, static_cast<signed char>(0), fp16{});
}
__device__ __forceinline__ void decode_in_order(unsigned codes, unsigned& first, unsigned& last, signed char) {
  decode_quickly(__byte_perm(codes, 0u, 0x3120), first, last, static_cast<signed char>(0));
}

// The power of 2 over which numbers are less than 2, the largest of which has these bits without its sign.
template <typename T>
__device__ __forceinline__ float unit_of(unsigned most) {
  const unsigned exponent = __float_as_uint(to_float(T{static_cast<unsigned short>(most)})) & 0x7f800000u;
  return __uint_as_float(min(max(exponent, 1u << 23), 253u << 23));
}

// A scale with infinity as NaN: a head that held either gives NaN, whatever its codes are.
__device__ __forceinline__ float usable_scale(float scale) { return fmaf(scale, 0.0f, scale); }

template <typename C>
constexpr float kLargestCode = 448.0f;
template <>
constexpr float kLargestCode<signed char> = 127.0f;

// The code nearest to x / scale, ties to even, saturating; 0 where the scale is.
__device__ __forceinline__ unsigned encode(float x, float scale, e4m3) {
  if (scale == 0.0f) return 0u;
  const float ratio = x / scale;
  if (ratio != ratio) return 0x7fu;
  const float magnitude = fminf(fabsf(ratio), 448.0f);
  const unsigned bits = __float_as_uint(magnitude), sign = __float_as_uint(ratio) >> 24 & 0x80u;
  if (magnitude < 0.015625f) return sign | static_cast<unsigned>(rintf(magnitude * 512.0f));  // below 2^-6
  return sign | (((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3));
}
__device__ __forceinline__ unsigned encode(float x, float scale, signed char) {
  if (!(scale > 0.0f)) return 0u;
  const float steps = fminf(fmaxf(rintf(x / scale), -127.0f), 127.0f);
  return static_cast<unsigned>(static_cast<int>(steps)) & 0xffu;
}

// The scale of the head that kLanes neighbouring lanes hold, each a piece; the whole warp comes here. NaN wins.
template <typename C, int kLanes, int kLow, int kHigh>
__device__ __forceinline__ float scale_of(const float (&low)[kLow], const float (&high)[kHigh]) {
  unsigned largest = 0u;  // bits of numbers without sign are in the order of the numbers, and those of NaN above all
#pragma unroll
  for (int i = 0; i < kLow; ++i) largest = max(largest, __float_as_uint(low[i]) & 0x7fffffffu);
#pragma unroll
  for (int i = 0; i < kHigh; ++i) largest = max(largest, __float_as_uint(high[i]) & 0x7fffffffu);
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  const float absmax = __uint_as_float(largest);
  const float scale = (kLargestCode<C> == 127.0f ? usable_scale(absmax) : absmax) / kLargestCode<C>;
  return scale < 0x1p-126f ? 0.0f : scale;  // units that flush have no smaller one
}

// The codes of head[begin .. end).
template <typename C, int kCount>
__device__ __forceinline__ void store_codes(Stored<C>* head, int begin, int end, const float (&x)[kCount], float scale) {
  unsigned words[kCount / 4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i / 4] |= encode(x[i], scale, C{}) << 8 * (i % 4);
  Stored<C>* const to = head + begin;
  if (end - begin == kCount && reinterpret_cast<unsigned long long>(to) % kCount == 0) {
    if constexpr (kCount == 8)
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    else
      *reinterpret_cast<unsigned*>(to) = words[0];
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (begin + i < end) to[i] = static_cast<Stored<C>>(words[i / 4] >> 8 * (i % 4));
}
