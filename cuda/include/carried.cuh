// What a rank has rounded off a sum of groups, and adds to what it brings to the next: ref/int8_feedback.py.
#pragma once

#include "hadamard.cuh"
#include "vec.cuh"

struct Carried {  // of numbers at the same places as those of x; null: there is nothing
  bf16* errors;
  int is_read;  // else nothing is carried yet
};

// What is carried of numbers of a group that exist or not: read before they are rotated, so that nobody waits for it alone.
template <int kCount>
__device__ __forceinline__ void load_carried(const Carried& carried, index_t place, bool exists, float (&errors)[kCount]) {
  const bool is_read = exists && carried.errors != nullptr && carried.is_read;
#pragma unroll
  for (int begin = 0; begin < kCount; begin += 8) {
    float part[8] = {};
    if (is_read) load_row(carried.errors + place + begin, 0, 8, true, part);
#pragma unroll
    for (int i = 0; i < 8; ++i) errors[begin + i] = part[i];
  }
}

// What codes leave out of y is carried on.
template <int kCount>
__device__ __forceinline__ void keep_carried(const Carried& carried, index_t place, bool exists, const float (&y)[kCount],
                                             const Codes<kCount>& codes) {
  if (!exists || carried.errors == nullptr) return;
  float sent[kCount];
  dequantize(codes, sent);
#pragma unroll
  for (int begin = 0; begin < kCount; begin += 8) {
    float part[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) part[i] = y[begin + i] - sent[begin + i];
    store_row(carried.errors + place + begin, 0, 8, true, part);
  }
}
