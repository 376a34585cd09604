// 16 bytes at a time: kWidth<T> numbers of a row as float32, guarded at the row's end.
#pragma once

#include "dtype.cuh"
#include "ptx.cuh"

template <typename T>
constexpr int kWidth = 16 / sizeof(T);  // numbers in 16 bytes

__device__ __forceinline__ bool is_aligned(const void* address) {
  return (reinterpret_cast<unsigned long long>(address) & 15) == 0;
}

__device__ __forceinline__ void unpack(const uint4& raw, float (&x)[4], float) {
  x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y);
  x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
}

template <typename T>  // bf16 or fp16
__device__ __forceinline__ void unpack(const uint4& raw, float (&x)[8], T) {
  const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = to_float(T{static_cast<unsigned short>(words[i])});
    x[2 * i + 1] = to_float(T{static_cast<unsigned short>(words[i] >> 16)});
  }
}

__device__ __forceinline__ uint4 pack(const float (&x)[4], float) {
  return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}
__device__ __forceinline__ uint4 pack(const float (&x)[8], bf16) {
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}
__device__ __forceinline__ uint4 pack(const float (&x)[8], fp16) {
  return make_uint4(pack_fp16(x[0], x[1]), pack_fp16(x[2], x[3]), pack_fp16(x[4], x[5]), pack_fp16(x[6], x[7]));
}

// row[i .. i + kWidth) as float32; numbers from row[n] on are not read and are 0 in x. `aligned`: row + i is at a
// multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ void load_row(const T* row, int i, int n, bool aligned, float (&x)[kWidth<T>]) {
  if (aligned && i + kWidth<T> <= n) {
    unpack(load16(row + i), x, T{});
    return;
  }
#pragma unroll
  for (int j = 0; j < kWidth<T>; ++j) x[j] = i + j < n ? to_float(row[i + j]) : 0.0f;
}

// The counterpart: nothing is written from row[n] on.
template <typename T>
__device__ __forceinline__ void store_row(T* row, int i, int n, bool aligned, const float (&x)[kWidth<T>]) {
  if (aligned && i + kWidth<T> <= n) {
    store16(row + i, pack(x, T{}));
    return;
  }
#pragma unroll
  for (int j = 0; j < kWidth<T>; ++j)
    if (i + j < n) row[i + j] = from_float<T>(x[j]);
}
